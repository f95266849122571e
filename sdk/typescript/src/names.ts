/**
 * camelCase for callers, snake_case on the wire: the only place where names are translated.
 *
 * Only fields of named objects are renamed. What a caller puts into one (a JSON schema, a map of
 * features) is passed on as it is.
 */

import { SHAPES } from "./types.js";

export function toWire(shape: string, value: unknown): unknown {
  return renamed(shape, value, snake);
}

export function fromWire<T>(shape: string, value: unknown): T {
  return renamed(shape, value, camel) as T;
}

function renamed(shape: string, value: unknown, rename: (name: string) => string): unknown {
  if (Array.isArray(value)) return value.map((item) => renamed(shape, item, rename));
  if (typeof value !== "object" || value === null) return value;
  const nested = SHAPES[shape] ?? {};
  const result: Record<string, unknown> = {};
  for (const [name, item] of Object.entries(value)) {
    const inner = nested[snake(name)];
    result[rename(name)] = inner === undefined ? item : renamed(inner, item, rename);
  }
  return result;
}

function snake(name: string): string {
  return name.replace(/[A-Z]/g, (letter) => `_${letter.toLowerCase()}`);
}

function camel(name: string): string {
  return name.replace(/_([a-z0-9])/g, (_, letter: string) => letter.toUpperCase());
}
