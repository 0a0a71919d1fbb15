export interface VNode {
  type: unknown;
}
export type Drawn = VNode | VNode[] | string | number | null | undefined | false;
export class Component<P> {
  constructor(props: P);
  props: P;
  setState(state: object): void;
  forceUpdate(): void;
}
export function h(type: unknown, props: unknown, ...children: unknown[]): VNode;
export function render(drawn: Drawn, into: Element): void;
