// What the page says in English and Chinese, the settings that it offers, and what it remembers of its reader.

export const WORDS = {
  model: ["Model", "模型"], adapter: ["adapter", "适配器"], newChat: ["New chat", "新对话"],
  language: ["切换到中文", "Switch to English"], otherLanguage: ["中", "EN"], theme: ["Light or dark", "浅色或深色"],
  settings: ["Settings", "设置"], close: ["Close", "关闭"], transcript: ["Conversation", "对话"], mode: ["Mode", "方式"],
  chat: ["Chat", "对话"], continueText: ["Continue text", "续写"], send: ["Send", "发送"], stop: ["Stop", "停止"],
  message: ["Message", "消息"], messageHint: ["Write a message", "写一条消息"], textHint: ["Begin a text", "写个开头"],
  keys: ["Enter sends, Shift+Enter breaks the line", "Enter 发送，Shift+Enter 换行"],
  welcomeChat: ["What would you like to ask?", "想问点什么？"],
  welcomeChatText: ["Point at any word of an answer to see how likely it was and what else the model considered.",
    "指向回答中的任意一处，可以看到它的概率，以及模型还考虑过什么。"],
  welcomeText: ["How does the text begin?", "文章如何开头？"],
  welcomeTextText: ["A model that was never taught to chat only continues what it reads. Point at any word that it adds to see what else it considered.",
    "没有学过对话的模型，只会接着读到的文字往下写。指向它写出的任意一处，可以看到它还考虑过什么。"],
  edit: ["Edit", "修改"], retry: ["Retry", "重试"], goOn: ["Go on", "接着写"], inside: ["Look inside", "看看里面"], looking: ["Recording the answer once more …", "正在重新回答并记录……"],
  first: ["first token {0} ms", "首个词元 {0} 毫秒"], speed: ["{0} tokens/s", "{0} 词元/秒"],
  tokens: ["{0} tokens", "{0} 个词元"], prompt: ["prompt {0}", "提示 {0}"], cached: ["prompt {0}, {1} reused", "提示 {0}，复用 {1}"],
  ended_stop: ["ended by itself", "自行结束"], ended_length: ["cut off at its limit", "达到长度上限"],
  ended_stopped: ["stopped by you", "已由你停止"],
  writing: ["The model is writing.", "模型正在写。"],
  noServer: ["The server cannot be reached: is it still running?", "连接不上服务器：它还在运行吗？"],
  cut: ["The connection ended before the answer did.", "回答还没写完，连接就断了。"],
  notOurs: ["The server answered with status {0} and no explanation.", "服务器返回状态 {0}，没有说明原因。"],
  busy: ["{0} Try again in {1} s.", "{0} 请在 {1} 秒后重试。"],
  needKey: ["This server asks for an API key: enter it in the settings.", "此服务器需要 API 密钥：请在设置中填写。"],
  key: ["API key", "API 密钥"], keyHelp: ["Kept until this tab is closed.", "仅保存到此标签页关闭为止。"],
  system: ["System message", "系统消息"], systemHint: ["none", "无"],
  systemHelp: ["Stands before the conversation and sets the tone.", "放在对话之前，定下基调。"],
  showTokens: ["Show tokens", "显示词元"],
  showTokensHelp: ["Marks where each token begins; the deeper its colour, the less likely it was.", "标出每个词元的起点；颜色越深，当时的概率越低。"],
  defaults: ["Back to the defaults", "恢复默认值"], fresh: ["fresh", "随机"],
  ofModel: ["What the model thought, before temperature and filters.", "模型自己的概率，未经温度和筛选。"],
  ofBytes: ["One character, written in {0} tokens:", "一个字符，由 {0} 个词元写成："],
};

// Name, lowest, highest, step, default, explanation. The names are the API's and stand on the page as they are.
export const SLIDERS = [
  ["temperature", 0, 2, 0.05, 0.8, "Higher is bolder; 0 always takes the most likely token.", "越高越大胆；0 总取最可能的词元。"],
  ["top_p", 0.05, 1, 0.05, 1, "Keeps the likeliest tokens up to this total; 1 keeps all.", "只保留概率之和达到此值的词元；1 为全部保留。"],
  ["top_k", 0, 200, 1, 0, "Keeps this many of the likeliest tokens; 0 keeps all.", "只保留最可能的这么多个词元；0 为全部保留。"],
  ["min_p", 0, 0.5, 0.01, 0, "Drops tokens below this share of the likeliest; 0 keeps all.", "去掉不及最可能者此比例的词元；0 为全部保留。"],
  ["repetition_penalty", 1, 2, 0.05, 1, "Above 1, what was already written becomes less likely.", "大于 1 时，已写过的词元更难再现。"],
  ["max_tokens", 1, 1000, 1, 200, "The answer ends here at the latest.", "回答最多这么长。"],
  ["candidates", 1, 20, 1, 5, "How many candidates are kept for each token.", "每个词元保留多少个候选。"],
];
export const SEED_HELP = ["The same number gives the same text; empty draws a fresh one.", "同一数字得到同一文字；留空则每次随机。"];
export const EXAMPLES = { chat: ["Hello!", "你好"], continue: ["话说天下大势，", "却说曹操", "In the beginning"] };

// ---- What is remembered ----

const remembered = JSON.parse(localStorage.getItem("llmtrain") ?? "{}");
export const preferences = {
  language: remembered.language ?? (navigator.language.startsWith("zh") ? "zh" : "en"),
  theme: remembered.theme ?? null, // null follows the system
  mode: remembered.mode ?? "chat",
  model: remembered.model ?? null,
  showTokens: remembered.showTokens ?? false,
  system: remembered.system ?? "",
  sampling: remembered.sampling ?? {},
};

export function remember(changes) {
  Object.assign(preferences, changes);
  localStorage.setItem("llmtrain", JSON.stringify(preferences));
}

export const pick = (english, chinese) => (preferences.language === "zh" ? chinese : english);
export const say = (word, ...values) => pick(...WORDS[word]).replace(/\{(\d)\}/g, (_, number) => values[number]);
