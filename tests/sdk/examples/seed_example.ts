import { ExpertClient } from '@coterie/client';

const client = new ExpertClient({ apiKey: '...' });

// Async/await
const result = await client.infer({
  prompt: 'Generate Rust async function',
  temperature: 0.4,
  maxTokens: 2048
});

console.log(result.text);
console.log(`Experts: ${result.expertsUsed.join(', ')}`);

// Streaming
const stream = client.inferStream({ prompt: '...' });
for await (const chunk of stream) {
  process.stdout.write(chunk.text);
}
