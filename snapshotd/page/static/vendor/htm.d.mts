interface Html<V> {
  (parts: TemplateStringsArray, ...values: unknown[]): V;
}
declare const htm: {
  bind<V>(h: (type: unknown, props: unknown, ...children: unknown[]) => V): Html<V>;
};
export default htm;
