export class Terminal {
  constructor(options: Record<string, unknown>);
  options: { disableStdin?: boolean; theme?: Record<string, string> };
  open(into: HTMLElement): void;
  focus(): void;
  write(data: Uint8Array | string, done?: () => void): void;
  resize(columns: number, rows: number): void;
  onData(told: (text: string) => void): void;
  onBinary(told: (text: string) => void): void;
  dispose(): void;
}
