// Histograms of `/metrics`, as Prometheus writes them.

/** The histograms called `name`, by the value of their one label: pairs of a bound and how many were at most so much. */
export function histograms(text, name) {
  const found = new Map();
  // Names of adapters are the server's; what is escaped in them is put back.
  const shape = /^[a-z_]+\{[a-z_]+="((?:[^"\\]|\\.)*)",le="([^"]+)"\} (\S+)$/;
  for (const line of text.split('\n')) {
    const parts = line.startsWith(`${name}_bucket{`) && shape.exec(line);
    if (!parts) continue;
    const label = parts[1].replace(/\\(.)/g, (_, escaped) => (escaped === 'n' ? '\n' : escaped));
    if (!found.has(label)) found.set(label, []);
    found.get(label).push([parts[2] === '+Inf' ? Infinity : Number(parts[2]), Number(parts[3])]);
  }
  return found;
}

/** What came to `now` since `before`; of a server that was started anew meanwhile, all of it. */
export function since(now, before = []) {
  const less = now.map(([bound, count], index) => [bound, count - (before[index]?.[1] ?? 0)]);
  return less.some(([, count]) => count < 0) ? now : less;
}

export const count = (buckets) => buckets.at(-1)?.[1] ?? 0;

/** The value that `part` of all are at most: as if those of a bucket were spread evenly over it. */
export function quantile(buckets, part) {
  const wanted = part * count(buckets);
  const index = buckets.findIndex(([, upTo]) => upTo >= wanted);
  const [low, before] = index > 0 ? buckets[index - 1] : [0, 0];
  const [high, upTo] = buckets[index];
  if (high === Infinity) return low;
  return low + (high - low) * (wanted - before) / Math.max(1, upTo - before);
}
