export interface Signal<T> {
  value: T;
  peek(): T;
}
export function signal<T>(value: T): Signal<T>;
export function computed<T>(read: () => T): Readonly<Signal<T>>;
export function effect(run: () => void): () => void;
export function batch<T>(run: () => T): T;
