// The page's one scale of colour, for shares between 0 and 1, and the tints of tokens.
//
// The scale is computed in OKLCH (Ottosson 2020): lightness falls (on paper) or rises (in the dark) evenly from end to
// end, so it reads the same without colour and with any kind of colour blindness; the hue turns from yellow over green
// to blue and only helps.

const colours = (() => {
  function fromOklch(lightness, chroma, hue) {
    const a = chroma * Math.cos((hue * Math.PI) / 180);
    const b = chroma * Math.sin((hue * Math.PI) / 180);
    const [l, m, s] = [
      lightness + 0.3963377774 * a + 0.2158037573 * b,
      lightness - 0.1055613458 * a - 0.0638541728 * b,
      lightness - 0.0894841775 * a - 1.291485548 * b,
    ].map((value) => value ** 3);
    return [
      4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
      -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
      -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
    ].map((linear) => {
      const value = Math.min(Math.max(linear, 0), 1);
      return Math.round(255 * (value <= 0.0031308 ? 12.92 * value : 1.055 * value ** (1 / 2.4) - 0.055));
    });
  }

  const between = (from, to, share) => from + (to - from) * share;
  const STEPS = 256;
  const table = (dark) => Array.from({ length: STEPS }, (_, index) => {
    const share = index / (STEPS - 1);
    const chroma = 0.012 + 0.118 * Math.sin(Math.PI * share * 0.8);
    return dark
      ? fromOklch(between(0.27, 0.93, share), chroma, between(262, 98, share))
      : fromOklch(between(0.965, 0.3, share), chroma, between(98, 268, share));
  });
  const tables = { light: table(false), dark: table(true) };
  const rgb = (share) => tables[settings.dark() ? "dark" : "light"][Math.round(Math.min(Math.max(share, 0), 1) * (STEPS - 1))];

  const luminance = (channels) => channels.map((each) => each / 255)
    .map((each) => (each <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4))
    .reduce((sum, each, index) => sum + each * [0.2126, 0.7152, 0.0722][index], 0);

  return {
    rgb,
    css: (share) => `rgb(${rgb(share).join(" ")})`,
    // Ink that can be read on that colour: at a luminance of 0.179 black and white have the same contrast, 4.6.
    ink: (share) => (luminance(rgb(share)) > 0.179 ? "#000000" : "#ffffff"),
    TINTS: 5,
  };
})();
