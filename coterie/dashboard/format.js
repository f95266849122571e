// Numbers and times as people read them.

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

export const count = (value) => whole.format(value ?? 0);

export function milliseconds(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const value = seconds * 1000;
  if (value < 10) return value.toFixed(1);
  return value < 100000 ? whole.format(value) : `${whole.format(seconds)} s`;
}

export function duration(ms) {
  if (ms === null || ms === undefined) return "–";
  if (ms < 10) return `${ms.toFixed(1)} ms`;
  return ms < 10000 ? `${whole.format(ms)} ms` : `${(ms / 1000).toFixed(1)} s`;
}

export function age(seconds) {
  const value = Math.max(seconds, 0);
  if (value < 60) return `${value.toFixed(value < 10 ? 1 : 0)} s`;
  if (value < 3600) return `${Math.floor(value / 60)} min`;
  return value < 86400 ? `${Math.floor(value / 3600)} h` : `${Math.floor(value / 86400)} d`;
}

export function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let number = value ?? 0;
  let unit = 0;
  while (number >= 1000 && unit < units.length - 1) {
    number /= 1000;
    unit += 1;
  }
  return `${number.toFixed(number < 10 && unit > 0 ? 1 : 0)} ${units[unit]}`;
}

export const percent = (share) => `${Math.round((share ?? 0) * 100)}%`;

export function clock(at) {
  return new Date(at * 1000).toLocaleTimeString("en-GB");
}

export function rate(value) {
  return value < 10 ? value.toFixed(1) : whole.format(value);
}
