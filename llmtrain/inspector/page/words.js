// What the page says in English and Chinese, and what it remembers of its reader.

const WORDS = {
  locale: ["en", "zh-CN"],
  title: ["Behind the line", "一行字的背后"],
  lede: ["What happened between this prompt and its answer, with the numbers of this very run.",
    "从这段提示到它的回答之间发生了什么——全部数字都来自这一次运行。"],
  language: ["切换到中文", "Switch to English"], otherLanguage: ["中文", "EN"],
  theme: ["Light or dark", "浅色或深色"], parts: ["Parts", "各部分"], skip: ["Skip to the text", "跳到正文"],
  keys: ["← → one token back or on · space plays · point at or tap a token to look closer",
    "← → 后退或前进一个词元 · 空格播放 · 指向或点按词元细看"],
  tokens: ["Tokens", "词元"],
  tokensSay: ["A model reads no letters: the text is cut into pieces from a fixed list, and each piece is a number.",
    "模型不认字：文本先按一张固定的表切成小块，每一块对应一个编号。"],
  embedding: ["Embedding", "嵌入"],
  embeddingSay: ["The number picks one row of a large table; this row of figures is what the model knows of the piece before reading on.",
    "编号从一张大表里取出一行；这一行数字，就是模型读下去之前对这一块的全部了解。"],
  position: ["Position", "位置"],
  positionSay_rope: ["So that order counts, each position turns the pairs of figures in queries and keys by its own angles; what two tokens then share depends only on how far apart they are.",
    "为了区分先后，每个位置把查询和键里的数字成对旋转一个自己的角度；于是两个词元之间的相合程度只取决于相隔多远。"],
  positionSay_sinusoidal: ["So that order counts, each position adds its own pattern of waves to the row of the token; patterns that lie close together are alike.",
    "为了区分先后，每个位置在词元的那一行上加一组自己的波形；相近的位置波形也相近。"],
  attention: ["Attention", "注意力"],
  attentionSay: ["Every token gathers from the tokens before it, and each head decides for itself how much from which.",
    "每个词元都从它前面的词元收集信息；向谁取、取多少，每个注意力头各有主张。"],
  cache: ["Prefill and KV cache", "预填充与 KV 缓存"],
  cacheSay: ["The prompt is read in one go, and the keys and values of every token are kept, so that each new token costs one step instead of reading everything again.",
    "提示一次读完，每个词元的键和值都留存下来；此后每个新词元只需走一步，不必从头再读。"],
  choice: ["From scores to choice", "从得分到选择"],
  choiceSay: ["The model gives every piece of its list a score; temperature and filters make chances of the scores, and one uniform random number picks.",
    "模型给表里的每一块打分；温度和筛选把得分变成概率，再由一个均匀随机数选出一块。"],
  loop: ["The loop", "循环"],
  loopSay: ["The chosen piece is put at the end of the text and the model reads on from there, until something tells it to end.",
    "选出的一块接到文末，模型接着往下读，直到有什么让它停下。"],
  layers: ["Layer by layer", "逐层来看"],
  layersSay: ["If the model had to speak after this layer already: the last step of scoring, applied to what each layer has so far.",
    "如果在这一层就得开口：把最后的打分步骤用在每一层已有的结果上。"],

  // Tokens
  promptAndAnswer: ["Prompt and answer", "提示与回答"],
  tokensCount: ["{0} tokens · {1} characters · {2} bytes · {3} characters per token", "{0} 个词元 · {1} 个字符 · {2} 字节 · 每词元 {3} 个字符"],
  id: ["id", "编号"], bytes: ["bytes", "字节"], characters: ["characters", "字符"], piece: ["piece", "词元"], at: ["position", "位置"],
  special: ["a control token, not text", "控制词元，不是文本"],
  partOf: ["byte {0} of {1} of the character {2}", "字符“{2}”共 {1} 字节，这里是第 {0} 字节"],
  loneByte: ["a byte that belongs to no character", "不属于任何字符的字节"],
  lookup: ["Look up an id or a piece", "按编号或词元查找"],
  lookupHint: ["a number, or a text such as “{0}”", "一个编号，或“{0}”这样的文字"],
  lookupScope: ["Searched: the {0} pieces that occur on this page.", "查找范围：本页出现的 {0} 个词元。"],
  lookupAll: ["Searched: all {0} pieces of the list.", "查找范围：词表全部 {0} 个词元。"],
  nothingFound: ["none of the pieces", "没有这样的词元"],

  // Embedding
  rowOf: ["Row {0} of {1}, {2} figures", "第 {0} 行，共 {1} 行，每行 {2} 个数"],
  neighbours: ["Nearest rows of the table", "表中最近的行"], cosine: ["cosine", "余弦"],
  norm: ["length", "长度"],
  tied: ["The output layer uses the same table: a token scores high when the last state points its way.",
    "输出层用的是同一张表：最后的状态越指向某一行，那个词元得分越高。"],
  untied: ["The output layer has a table of its own.", "输出层另有一张自己的表。"],
  rowLabel: ["The embedding row of this token, one stripe for each figure", "这个词元的嵌入行，每个数一条色带"],

  // Position
  pair: ["pair {0}", "第 {0} 对"], turns: ["one turn in {0} positions", "每 {0} 个位置转一圈"],
  positionAt: ["Position {0}", "位置 {0}"], circles: ["Angles of the pairs at this position, from the fastest to the slowest", "此位置上各对的角度，从最快到最慢"],
  byDistance: ["Dot product of the same query and key, turned to different places", "同一查询与键旋转到不同位置后的点积"],
  byDistanceWave: ["Dot product of the position vectors", "位置向量的点积"],
  distance: ["distance in tokens", "相隔词元数"], dot: ["dot product", "点积"],
  sameCurve: ["{0} starting points, one curve: the largest difference between them is {1}.", "{0} 个起点，同一条曲线：彼此最大差异为 {1}。"],
  waves: ["The waves added at every position", "每个位置所加的波形"],
  dimension: ["dimension", "维"],

  // Attention
  layer: ["layer", "层"], head: ["head", "头"], layerN: ["Layer {0}", "第 {0} 层"], headN: ["Head {0}", "头 {0}"],
  group: ["These {0} heads share one set of keys and values (KV head {1}).", "这 {0} 个头共用一组键和值（KV 头 {1}）。"],
  groupNone: ["Every head has keys and values of its own.", "每个头都有自己的键和值。"],
  looks: ["The text, coloured by how much is looked at", "文本，颜色表示受关注的程度"], lookingAt: ["looks at", "看向"], earlier: ["earlier text", "更早的文本"],
  entropyBits: ["entropy {0} bits", "熵 {0} 比特"],
  entropySay: ["0: all on one token; {0}: evenly over all that can be seen. Mean over the tokens shown.", "0：全部落在一个词元；{0}：平均分给所有可见的词元。为所示词元的平均值。"],
  rows: ["who looks (rows)", "谁在看（行）"], columns: ["at whom (columns)", "看向谁（列）"],
  matrixLabel: ["Attention weights of layer {0}, head {1}: {2} by {2} tokens; above the diagonal nothing", "第 {0} 层头 {1} 的注意力权重：{2}×{2} 词元；对角线以上为空"],
  scale: ["weight", "权重"],
  windowed: ["A long text: weights were kept from position {0} on.", "文本较长：只保留了位置 {0} 之后的权重。"],
  notRead: ["The last token was never read: nothing had to follow it.", "最后一个词元没有被读过：后面不再需要什么。"],
  notRecorded: ["not recorded for this token", "此词元没有记录"],

  // Cache
  ttft: ["Time to first token", "首个词元用时"], perToken: ["cache per token", "每词元缓存"], inAll: ["cache now", "当前缓存"],
  afterStep: ["after {0} tokens", "{0} 个词元后"], cacheFormula: ["2 (key and value) × {0} (layers) × {1} (KV heads) × {2} (head size) × {3} (bytes)", "2（键与值）× {0} 层 × {1} 个 KV 头 × {2} 个数 × {3} 字节"],
  ttftAgainst: ["Time to first token against prompt length", "首个词元用时与提示长度"], promptLength: ["prompt length in tokens", "提示长度（词元）"],
  timeAgainst: ["Time per token, with and without the cache", "有无缓存时每词元的用时"], length: ["text so far in tokens", "已有文本（词元）"],
  withCache: ["with cache", "有缓存"], withoutCache: ["without", "无缓存"], growth: ["Cache as the text grows", "缓存随文本增长"],
  stepTimes: ["This answer: time of each token", "本次回答：每个词元的用时"],
  noTimes: ["Not measured in this run.", "本次运行没有测量。"],
  mhaWould: ["{0} if every head kept its own", "若每个头各存一份则为 {0}"],

  // Choice
  temperature: ["Flattens (above 1) or sharpens (below 1) the chances; 0 takes the first.", "大于 1 拉平概率，小于 1 拉大差距；0 直接取第一名。"],
  top_k: ["Only this many of the first; 0 keeps all.", "只留前几名；0 为全部保留。"],
  top_p: ["Only the first ones that together reach this; 1 keeps all.", "只留累计概率达到此值的前几名；1 为全部保留。"],
  min_p: ["Only those at least this share of the first; 0 keeps all.", "只留不低于第一名此比例的；0 为全部保留。"],
  asRun: ["As in this run", "恢复本次运行的设置"], isRun: ["These are the settings of this run.", "这就是本次运行的设置。"],
  changed: ["Not as it was run: the answer above stays, this shows what would have been drawn.", "与本次运行不同：上面的回答不变，这里显示本会抽到什么。"],
  logit: ["score", "得分"], probability: ["chance", "概率"], candidate: ["candidate", "候选"],
  droppedBy: ["out: {0}", "被 {0} 去掉"], kept: ["{0} of {1} pieces are left", "{1} 个词元中留下 {0} 个"],
  uniform: ["random number {0}", "随机数 {0}"], drawnIs: ["sampled", "抽样所得"], greedyIs: ["greedy", "贪心所得"],
  barLabel: ["The chances end to end, in the order of the ids; the mark is the random number", "概率按编号顺序首尾相接；标记处为随机数"],
  inOrder: ["in the order of their ids", "按编号排列"],
  own: ["unfiltered", "筛选前"],
  noUniform: ["This run was greedy and drew no number: 0.5 stands in for it.", "本次运行为贪心解码，没有抽随机数：这里以 0.5 代替。"],
  noDraw: ["No random number is used: the highest score wins.", "不用随机数：得分最高者胜。"],
  partialScores: ["The recording holds the first {0} of {1} scores: what is computed here leaves out the rest.", "只记录了 {1} 个得分中的前 {0} 个：这里的计算略去其余。"],
  reached: ["in this run", "本次运行"], nextAt: ["Token {0} of the answer, after", "回答的第 {0} 个词元，接在"], after: ["", "之后"],
  penaltyNote: ["Scores stand after the repetition penalty of {0}.", "得分已计入重复惩罚 {0}。"],

  // Loop
  play: ["Play", "播放"], pause: ["Pause", "暂停"], back: ["One token back", "后退一个词元"], on: ["One token on", "前进一个词元"],
  toStart: ["To the prompt", "回到提示"], toEnd: ["To the end", "到结尾"], stepOf: ["{0} / {1}", "{0} / {1}"],
  stepLabel: ["Tokens of the answer written so far", "已写出的回答词元"], speed: ["Speed", "速度"],
  ended: ["Why it ended", "为何停下"],
  ended_end_token: ["The model chose its end token {0}: it had nothing to add.", "模型选了结束词元 {0}：话已说完。"],
  ended_stop_id: ["The token {0} was set as a stop.", "词元 {0} 被设为停止词元。"],
  ended_stop_string: ["The stop string “{0}” was written.", "写到了停止串“{0}”。"],
  ended_length: ["The limit of {0} tokens was reached; the model would have gone on.", "达到了 {0} 个词元的上限；模型本可以接着写。"],
  ended_context: ["The context is full: the model can read no more than {0} tokens at once.", "上下文已满：模型一次最多读 {0} 个词元。"],
  ended_other: ["Ended: {0}.", "已结束：{0}。"],
  noAnswer: ["No token was generated in this run; the parts above show the prompt.", "本次运行没有生成词元；以上各部分展示的是提示。"],
  p: ["chance {0}", "概率 {0}"], stepTime: ["time", "用时"], table: ["Step by step", "逐步记录"], uniformShort: ["random", "随机数"], rank: ["rank", "名次"],

  // Layers
  afterLayer: ["after layer {0}", "第 {0} 层之后"], beforeLayers: ["before any layer", "进入各层之前"],
  layersAt: ["At {0} (position {1}): what comes next?", "在 {0}（位置 {1}）：下一个是什么？"],
  actual: ["what came", "实际的下一个"],
  madeBy: ["{0} · {1} on {2} · largest difference between the scores of the run and those of the reading shown here: {3}",
    "{0} · {1}，{2} · 运行时的得分与此处所示重读的得分之间的最大差异：{3}"],
  parameters: ["{0} parameters", "{0} 参数"],
  shape: ["layers {0}, heads {1}, KV heads {2}", "{0} 层，{1} 个头，{2} 个 KV 头"],
};

// ---- What is remembered ----

const settings = (() => {
  const KEY = "llmtrain.inspector";
  let kept = {};
  try { kept = JSON.parse(localStorage.getItem(KEY) ?? "{}"); } catch { /* a page on disk may have no store */ }
  const system = matchMedia("(prefers-color-scheme: dark)");
  return {
    language: kept.language ?? (navigator.language.startsWith("zh") ? "zh" : "en"),
    theme: kept.theme ?? null, // null follows the system
    system,
    dark() { return (this.theme ?? (system.matches ? "dark" : "light")) === "dark"; },
    still: () => matchMedia("(prefers-reduced-motion: reduce)").matches,
    remember(changes) {
      Object.assign(this, changes);
      try { localStorage.setItem(KEY, JSON.stringify({ language: this.language, theme: this.theme })); } catch { /* as above */ }
    },
  };
})();

const say = (word, ...values) => WORDS[word][settings.language === "zh" ? 1 : 0].replace(/\{(\d)\}/g, (_, index) => values[index]);
