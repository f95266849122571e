// what Node has beside the web's own, and the examples use
declare const process: { stdout: { write(text: string): boolean } };
