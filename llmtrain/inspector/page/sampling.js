// From logits to a token id: llmtrain/generation/sampling.py once more, for one row, so that the sliders of the page
// recompute what the engine would have done.
//
// The engine computes in fp32, JavaScript in fp64. Where a result decides something (a threshold, a cumulative sum), it
// is rounded to fp32 with Math.fround as the engine's is: a double that lies between two floats would call a tie what the
// engine does not, or the other way round. Sums run in fp64 and are rounded at each step, as torch.cumsum does on a CPU.

const sampling = (() => {
  const round = Math.fround;
  const LOWEST_TEMPERATURE = 1e-6;
  const LARGEST_UNIFORM = 1 - 2 ** -24; // the largest fp32 below 1

  const largest = (values) => values.reduce((most, value) => (value > most ? value : most), -Infinity);
  const descending = (values) => Float32Array.from(values).sort().reverse();
  const below = (logits, threshold) => logits.map((value) => (value < threshold ? -Infinity : value));

  function logTotal(logits) {
    const most = largest(logits);
    let total = 0;
    for (const value of logits) total += round(Math.exp(round(value - most)));
    return round(round(Math.log(round(total))) + most);
  }

  function probabilities(logits) {
    const most = largest(logits);
    const shares = logits.map((value) => Math.exp(round(value - most)));
    let total = 0;
    for (const share of shares) total += share;
    return shares.map((share) => share / round(total)); // a Float32Array rounds what it is given
  }

  function penalize(logits, seen, penalty) {
    if (penalty === 1) return logits;
    const changed = logits.slice();
    for (const id of seen) changed[id] = logits[id] < 0 ? logits[id] * round(penalty) : logits[id] / round(penalty);
    return changed;
  }

  function keepTopK(logits, k) {
    return k > 0 ? below(logits, descending(logits)[Math.min(k, logits.length) - 1]) : logits;
  }

  function keepTopP(logits, p) {
    if (!(p < 1)) return logits;
    const values = descending(logits);
    const total = logTotal(logits);
    const limit = round(p);
    let sum = 0;
    let kept = 0;
    for (const value of values) {
      const share = round(Math.exp(round(value - total)));
      sum += share;
      if (!(round(round(sum) - share) < limit)) break; // what the more likely tokens already hold
      kept += 1;
    }
    return below(logits, values[Math.max(kept, 1) - 1]);
  }

  function keepMinP(logits, p) {
    return p > 0 ? below(logits, round(largest(logits) + round(Math.log(round(p))))) : logits;
  }

  function draw(shares, uniform) {
    const cumulative = new Float32Array(shares.length);
    let sum = 0;
    shares.forEach((share, id) => { cumulative[id] = sum += share; });
    const total = cumulative[cumulative.length - 1];
    const target = round(Math.min(round(uniform), LARGEST_UNIFORM) * total);
    return { id: cumulative.findIndex((value) => value > target), target, total, cumulative };
  }

  function mostLikely(logits) {
    let best = 0;
    logits.forEach((value, id) => { if (value > logits[best]) best = id; });
    return best;
  }

  // Everything between a row of logits (Float32Array) and the choice, with the reasons for it.
  //   seen: ids that the repetition penalty touches.
  // Gives: logits after penalty and temperature, shares (probabilities of what is left, 0 for what is not), dropped (for
  // each id 0, or 1 top-k, 2 top-p, 3 min-p), kept (how many are left), id, greedyId, and the draw's figures.
  function choose(logits, { temperature = 1, top_k = 0, top_p = 1, min_p = 0, repetition_penalty = 1 }, uniform, seen = []) {
    const penalized = penalize(logits, seen, repetition_penalty);
    const greedyId = mostLikely(penalized);
    if (temperature === 0) {
      const shares = new Float32Array(logits.length);
      shares[greedyId] = 1;
      const dropped = new Uint8Array(logits.length).fill(4);
      dropped[greedyId] = 0;
      return { greedy: true, logits: penalized, shares, dropped, kept: 1, id: greedyId, greedyId };
    }
    const divisor = round(Math.max(temperature, LOWEST_TEMPERATURE));
    const scaled = penalized.map((value) => value / divisor);
    const dropped = new Uint8Array(logits.length);
    let left = scaled;
    [(row) => keepTopK(row, top_k), (row) => keepTopP(row, top_p), (row) => keepMinP(row, min_p)].forEach((filter, index) => {
      left = filter(left);
      left.forEach((value, id) => { if (value === -Infinity && !dropped[id]) dropped[id] = index + 1; });
    });
    const shares = probabilities(left);
    const kept = left.reduce((count, value) => count + (value > -Infinity), 0);
    return { greedy: false, logits: scaled, shares, dropped, kept, greedyId, ...draw(shares, uniform) };
  }

  return { choose, penalize, probabilities, keepTopK, keepTopP, keepMinP, draw, mostLikely };
})();
