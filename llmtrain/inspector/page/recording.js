// The recorded document (schema llmtrain.inspect/1), read once: arrays unpacked when first asked for, ids as pieces.
// The parts of the page know the document only through this.

const recording = (() => {
  const document_ = JSON.parse(document.getElementById("document").textContent);
  const { model, vocabulary, finish, layer_lens: lens, attention, embedding, positions } = document_;
  const known = (values) => new Set(values ?? []);
  const special = known(vocabulary.special);

  // {dtype, shape, base64} → typed array; little-endian, as are all machines that browsers run on.
  const opened = new WeakMap();
  function array(packed) {
    if (!opened.has(packed)) {
      const { buffer } = Uint8Array.from(atob(packed.base64), (each) => each.charCodeAt(0));
      opened.set(packed, packed.dtype === "int32" ? new Int32Array(buffer) : new Float32Array(buffer));
    }
    return opened.get(packed);
  }

  const bytesOf = (text) => (text.match(/[0-9a-f]{2}/g) ?? []).map((each) => parseInt(each, 16));
  function labelled(token) {
    if (token.special || token.text === null) token.label = token.text ?? token.bytes.map((each) => hex(each)).join(" ");
    else token.label = token.text.trim() === "" || /[\x00-\x1f]/.test(token.text) ? JSON.stringify(token.text) : token.text;
    return token;
  }
  const tokens = document_.tokens.map((token) => labelled({ ...token, bytes: bytesOf(token.bytes) }));

  const pieces = new Map();
  function piece(id) {
    if (!pieces.has(id)) {
      const text = vocabulary.pieces[id] ?? "";
      const raw = /^‹([0-9a-f]{2}(?: [0-9a-f]{2})*)›$/.exec(text);
      pieces.set(id, labelled({ id, text: raw ? null : text, bytes: raw ? bytesOf(raw[1]) : [], special: special.has(id) || text === "" }));
    }
    return pieces.get(id);
  }

  const rows = new Map(embedding.tokens.map((each) => [each.id, each]));
  const { steps: measuredSteps } = document_;
  const steps = measuredSteps.map((step) => {
    const chosen = step.candidates.find((each) => each.id === step.token);
    return { ...step, chance: chosen ? chosen.chance : null };
  });

  const number_ = (value) => number.count(value);
  const shortCount = (value) => (value >= 1e9 ? `${(value / 1e9).toFixed(1)} B` : value >= 1e6 ? `${(value / 1e6).toFixed(1)} M` : number_(value));
  const ENDINGS = {
    end_token: () => say("ended_end_token", finish.text), stop_id: () => say("ended_stop_id", finish.text ?? finish.id),
    stop_string: () => say("ended_stop_string", finish.text ?? ""), length: () => say("ended_length", number_(finish.limit)),
    context: () => say("ended_context", number_(finish.limit)),
  };

  return {
    model, tokens, steps, piece,
    checks: document_.checks,
    prompt: document_.prompt,
    answer: document_.answer,
    text: document_.prompt + document_.answer,
    promptLength: document_.prompt_tokens,
    answerLength: document_.answer_tokens,
    readLength: document_.read_tokens,
    vocabulary: vocabulary.size,
    sampling: Object.fromEntries(["temperature", "top_k", "top_p", "min_p"].map((name) => [name, document_.sampling[name]])),
    penalty: document_.sampling.repetition_penalty,
    pieces: () => Object.keys(vocabulary.pieces).map((id) => piece(Number(id))),
    embedding: {
      rows: embedding.rows, width: embedding.width, tied: embedding.tied,
      of(id) {
        const found = rows.get(id);
        return found && { ...found, row: array(found.row) };
      },
    },
    position: {
      kind: positions.kind, first: positions.first, count: positions.count,
      ...(positions.kind === "sinusoidal"
        ? { vectors: array(positions.vectors), width: positions.vectors.shape[1] }
        : { frequencies: array(positions.frequencies), cos: array(positions.cos), sin: array(positions.sin) }),
      distance: {
        products: positions.distance.products.map(array), largestDifference: positions.distance.largest_difference,
        places: positions.distance.places,
      },
    },
    heads: {
      first: attention.first, count: attention.count, perKv: attention.heads_per_kv_head,
      layers: attention.layers.map(({ heads }) => heads.map((head) => ({
        kv: head.kv_head, entropy: head.mean_entropy,
        // The weights of one position on those from the window's first to itself.
        row: (index) => array(head.weights).subarray((index * (index + 1)) / 2, ((index + 1) * (index + 2)) / 2),
        entropyOf: (index) => array(head.entropy)[index],
        before: (index) => (head.before ? array(head.before)[index] : 0),
      }))),
    },
    lens: {
      // What every layer says behind a position; null where none was kept.
      at(position) {
        const index = position - lens.first;
        if (index < 0 || index >= lens.count) return null;
        const { candidates } = lens;
        return lens.layers.map((layer) => ({
          top: Array.from({ length: candidates }, (_, place) => ({
            id: array(layer.ids)[index * candidates + place], probability: array(layer.probabilities)[index * candidates + place],
          })),
          next: index < array(layer.next_rank).length
            ? { probability: array(layer.next_probability)[index], rank: array(layer.next_rank)[index] } : null,
        }));
      },
    },
    cache: document_.cache,
    measured: document_.measured?.lengths ?? [],
    // The scores of a step: all of them, or the highest in the order of their ids.
    scores(step) {
      const { scores } = steps[step];
      return { logits: array(scores.logits), ids: scores.kind === "all" ? null : array(scores.ids), rest: scores.rest ?? 0 };
    },
    endedBecause: () => (ENDINGS[finish.kind] ?? (() => say("ended_other", finish.kind)))(),
    modelLine: () => [model.name, say("parameters", shortCount(model.parameters)), say("shape", model.layers, model.heads, model.kv_heads)]
      .filter(Boolean).join(" · "),
    footLine: () => say("madeBy", document_.schema, model.dtype, model.device, number.plain(document_.checks?.logits ?? 0, 6)),
  };
})();
