// Draws the report from the JSON in #data. No library but plotly.js, no request, one function a section.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const page = document.getElementById("page");
// Colours that stay apart for the colour-blind (Okabe and Ito).
const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000"];

const NAMES = { forgetting_transformer: "FoX", transformer: "Transformer (LLaMA)", mamba2: "Mamba-2", hgrn2: "HGRN2", delta_net: "DeltaNet", samba: "Samba" };

// "FoX (Pro)" and so on: what the paper calls a configuration.
function modelName(model) {
  const kind = model.model_type.split("-")[0];
  if (kind === "transformer") return model.window_size ? "Transformer (sliding window)" : NAMES[kind];
  if (kind !== "forgetting_transformer") return NAMES[kind] || kind;
  const pro = model.use_output_gate || model.use_output_norm || model.qk_norm || model.use_k_shift || model.use_v_shift;
  return (model.fgate_type === "none" ? "Transformer" : "FoX") + (pro ? " (Pro)" : " (LLaMA)");
}

const runs = data.runs.map((run, i) => {
  const config = run.run.config;
  const train = run.metrics.filter(line => line.kind === "train");
  return { ...run, config, train, evals: run.metrics.filter(line => line.kind === "eval"),
           gateLines: run.metrics.filter(line => line.kind === "gates"), label: modelName(config.model),
           colour: COLOURS[i % COLOURS.length], context: config.data.context };
});
// Two runs of one kind are told apart by their folders.
for (const run of runs) run.title = runs.filter(other => other.label === run.label).length > 1 ? `${run.label}, ${run.name}` : run.label;

function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}
function section(title, lead) {
  const box = element("section");
  box.append(element("h2", {}, title));
  if (lead) box.append(element("p", { class: "soft" }, lead));
  page.append(box);
  return box;
}
const swatch = run => element("span", { class: "swatch", style: `background:${run.colour}` });
const known = value => value !== undefined && value !== null;
const fixed = (value, digits) => !known(value) ? "–" : Number(value).toFixed(digits);
const percent = value => !known(value) ? "–" : `${(100 * value).toFixed(0)} %`;
const shortCommit = commit => commit.replace(/^([0-9a-f]{12})[0-9a-f]*/, "$1");
const count = value => value >= 1e9 ? `${(value / 1e9).toFixed(2)} B` : value >= 1e6 ? `${(value / 1e6).toFixed(2)} M` : value >= 1e3 ? `${(value / 1e3).toFixed(1)} k` : `${value}`;
const median = values => { const v = [...values].sort((a, b) => a - b); return v.length ? v[v.length >> 1] : undefined; };

function table(head, rows) {
  const box = element("table");
  box.append(element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows.map(row => element("tr", {}, ...row))));
  return element("div", { class: "card scroll" }, box);
}
function plot(parent, traces, layout, className = "plot") {
  const div = element("div", { class: className });
  parent.append(div);
  Plotly.newPlot(div, traces, {
    margin: { l: 60, r: 20, t: 14, b: 48 }, font: { family: "system-ui, sans-serif", size: 13 }, paper_bgcolor: "#fff",
    plot_bgcolor: "#fff", legend: { orientation: "h", y: 1.12 }, hovermode: "x unified", ...layout,
  }, { responsive: true, displaylogo: false, displayModeBar: false });
}

function opening() {
  document.title = data.title;
  page.append(element("h1", {}, data.title));
  const scored = runs.filter(run => run.loss);
  if (scored.length) {
    const last = run => { const bins = run.loss.per_token.bins; return bins[bins.length - 1]; };
    // "+1.470": how much worse than where training ended; a change below the last digit is none.
    const change = value => Math.abs(value) < 0.0005 ? "no change" : `${value > 0 ? "+" : "−"}${fixed(Math.abs(value), 3)}`;
    const line = scored.map(run => `${run.title} ${fixed(last(run).loss, 2)}` +
      (known(last(run).difference) ? ` (${change(last(run).difference)})` : "")).join(", ");
    const bin = last(scored[0]);
    page.append(element("p", {}, `Each model was trained on contexts of ${runs[0].context} tokens and then read held-out text in windows of ` +
      `${scored[0].loss.per_token.length}. Loss in nats a token at positions ${bin.begin}–${bin.end}, and how it changed from the last positions within the training length: ${line}.`));
  }
  page.append(element("p", { class: "soft" }, `Written by fox ${data.version} (${shortCommit(data.commit)}). Loss is in nats a token; lower is better.`));
  if (data.notes) page.append(element("div", { class: "card note" }, element("b", {}, "Read this before the numbers"),
    element("ul", {}, ...data.notes.map(note => element("li", {}, note)))));
}

function departures() {
  const notes = [];
  for (const run of runs) {
    const model = run.config.model;
    if (model.fgate_bias_init && model.decay_time_min) notes.push(`${run.title}: gate biases start at memory lengths log-spaced from ` +
      `${model.decay_time_min} to ${model.decay_time_max} tokens over the heads. This departs from the published initialisation (bias 0).`);
  }
  if (notes.length) page.append(element("div", { class: "card note" }, element("b", {}, "Departures from the published recipe"),
    element("ul", {}, ...notes.map(note => element("li", {}, note)))));
}

function overview() {
  const scored = runs.filter(run => run.loss);
  const box = section("At a glance", scored.length
    ? "Every position range averages the same held-out tokens, so that columns can be compared. Shaded: beyond the training length."
    : "None of the runs has been evaluated yet: `fox eval run` with their directories measures loss, gates and samples. Then make this page again.");
  const bins = scored.length ? scored[0].loss.per_token.bins : [];
  const head = ["", "parameters", "bits a byte", ...bins.map(b => `${b.begin}–${b.end}`)].map((text, i) =>
    element("th", i >= 3 && bins[i - 3].begin >= runs[0].context ? { class: "beyond" } : {}, text));
  const lowest = bins.map((_, i) => Math.min(...scored.map(run => run.loss.per_token.bins[i]?.loss ?? Infinity)));
  const rows = runs.map(run => [
    element("td", {}, swatch(run), run.title),
    element("td", {}, run.run.parameters ? count(run.run.parameters) : "–"),
    element("td", {}, fixed(run.loss?.held_out?.bits_per_byte, 3)),
    ...bins.map((bin, i) => {
      const own = run.loss?.per_token.bins[i];
      const classes = [bin.begin >= run.context ? "beyond" : "", own && own.loss <= lowest[i] + 1e-9 ? "best" : ""].join(" ").trim();
      return element("td", { class: classes, title: known(own?.loss_error) ? `± ${fixed(own.loss_error, 3)}` : "" }, fixed(own?.loss, 3));
    }),
  ]);
  box.append(table(head, rows));
}

function perTokenLoss() {
  const scored = runs.filter(run => run.loss);
  if (!scored.length) return;
  const box = section("Loss at each position of the context",
    "Moving average over 101 positions. A model that uses far context keeps falling; one that cannot go beyond its training length rises after the dashed line.");
  const card = element("div", { class: "card" });
  box.append(card);
  const shapes = [...new Set(scored.map(run => run.context))].map(context => ({ type: "line", x0: context, x1: context, yref: "paper", y0: 0, y1: 1, line: { dash: "dash", color: "#5d606b", width: 1.5 } }));
  plot(card, scored.map(run => ({ name: run.title, y: run.loss.per_token.smoothed, x: run.loss.per_token.smoothed.map((_, i) => i * (run.loss.per_token.smoothed_every ?? 1) + 1),
    line: { color: run.colour, width: 2 }, hovertemplate: "%{y:.3f}" })),
    { shapes, xaxis: { title: { text: "position in the context (tokens)" } }, yaxis: { title: { text: "loss (nats a token)" } },
      annotations: [{ x: scored[0].context, y: 1, yref: "paper", yanchor: "top", xanchor: "left", xshift: 6, showarrow: false, text: "training length", font: { color: "#5d606b" } }] });
}

function firstWords() {
  const scored = runs.filter(run => run.loss?.per_token.bins.some(bin => known(bin.first_word_accuracy)));
  if (!scored.length) return;
  const box = section("Counting verses: accuracy on the labels that lead each line",
    "A label token lies between a line start and the first token that begins with a space. Predicting it takes a memory of the previous label, about a verse back. Loss of the two kinds of token shows where far context helps.");
  const bins = scored[0].loss.per_token.bins;
  const head = ["", ...bins.map(b => `${b.begin}–${b.end}`)].map((text, i) => element("th", i && bins[i - 1].begin >= scored[0].context ? { class: "beyond" } : {}, text));
  const rows = [];
  for (const run of scored) {
    const cells = field => run.loss.per_token.bins.map(bin => element("td", bin.begin >= run.context ? { class: "beyond" } : {}, field(bin)));
    rows.push([element("td", {}, swatch(run), `${run.title}: label accuracy`), ...cells(bin => percent(bin.first_word_accuracy))]);
    if (known(run.loss.per_token.bins[0].first_word_loss)) {
      rows.push([element("td", { class: "soft" }, "loss of label tokens"), ...cells(bin => fixed(bin.first_word_loss, 3))]);
      rows.push([element("td", { class: "soft" }, "loss of all other tokens"), ...cells(bin => fixed(bin.other_loss, 3))]);
    }
  }
  box.append(table(head, rows));
}

function trainingCurves() {
  const trained = runs.filter(run => run.train.length);
  if (!trained.length) return;
  const box = section("Training", "Thin: loss of each logged step. Points: loss on held-out text.");
  const card = element("div", { class: "card" });
  box.append(card);
  plot(card, trained.flatMap(run => [
    { name: run.title, x: run.train.map(l => l.tokens), y: run.train.map(l => l.loss), mode: "lines", line: { color: run.colour, width: 1.2 }, legendgroup: run.title, hovertemplate: "%{y:.3f}" },
    { name: `${run.title}, held out`, x: run.evals.map(l => l.tokens), y: run.evals.map(l => l.loss), mode: "markers", marker: { color: run.colour, size: 8 }, legendgroup: run.title, showlegend: false, hovertemplate: "%{y:.3f} held out" },
  ]), { xaxis: { title: { text: "tokens trained on" } }, yaxis: { title: { text: "loss (nats a token)" } } });
  plot(card, trained.map(run => ({ name: run.title, x: run.train.map(l => l.tokens), y: run.train.map(l => l.tokens_per_s), mode: "lines", line: { color: run.colour, width: 1.2 }, hovertemplate: "%{y:,.0f}" })),
    { xaxis: { title: { text: "tokens trained on" } }, yaxis: { title: { text: "tokens/s" }, rangemode: "tozero" } }, "plot low");
  const head = ["", "tokens", "last loss", "held-out loss", "tokens/s (median)"].map(text => element("th", {}, text));
  box.append(table(head, trained.map(run => {
    const last = run.train[run.train.length - 1], held = run.evals[run.evals.length - 1];
    return [element("td", {}, swatch(run), run.title), element("td", {}, count(last.tokens)), element("td", {}, fixed(last.loss, 3)),
      element("td", {}, fixed(held?.loss, 3)), element("td", {}, count(median(run.train.map(l => l.tokens_per_s).filter(Boolean)) || 0))];
  })));
}

// A line a quantile over all heads: how far the gates look as training goes on.
function gatesWhileTraining() {
  const gated = runs.filter(run => run.gateLines.length);
  if (!gated.length) return;
  const box = section("How the gates learned", "Memory length of the heads on a held-out context: the shortest, the quartiles and the longest, and the share of attention's blocks that pruning skips.");
  const card = element("div", { class: "card" });
  box.append(card);
  const names = ["shortest", "first quartile", "median", "third quartile", "longest"];
  const xaxis = { title: { text: "tokens trained on" } };
  plot(card, gated.flatMap(run => {
    const sorted = run.gateLines.map(l => l.memory_lengths.map(m => m ?? Infinity).sort((a, b) => a - b));
    return names.map((name, q) => ({ name: `${run.title}, ${name}`, x: run.gateLines.map(l => l.tokens), y: sorted.map(m => m[Math.round(q * (m.length - 1) / 4)]),
      mode: "lines+markers", line: { color: run.colour, width: q === 2 ? 2.5 : 1, dash: ["dot", "dash", "solid", "dash", "dot"][q] }, hovertemplate: "%{y:.1f} tokens" }));
  }), { xaxis, yaxis: { type: "log", dtick: 1, title: { text: "memory length (tokens)" } } });
  plot(card, gated.map(run => ({ name: run.title, x: run.gateLines.map(l => l.tokens), y: run.gateLines.map(l => l.skipped_share), mode: "lines+markers", line: { color: run.colour, width: 2 }, hovertemplate: "%{y:.1%}" })),
    { xaxis, yaxis: { range: [0, 1], tickformat: ".0%", title: { text: "blocks skipped" } } }, "plot low");
}

function memoryLengths() {
  const gated = runs.filter(run => run.gates?.has_gates);
  if (!gated.length) return;
  const box = section("What the heads remember",
    "Memory length of a head: 1 / (−mean log f), the number of tokens after which a weight has fallen to 1/e on average. Pruning skips the 64×64 blocks of attention whose weights are provably below the tolerance.");
  const card = element("div", { class: "card" });
  box.append(card);
  const headName = h => `layer ${h.layer}, head ${h.head}`;
  // Of many heads only the first of each layer is named on the axis; the pointer names all.
  const many = Math.max(...gated.map(run => run.gates.heads.length)) > 48;
  const named = [...new Set(gated.flatMap(run => run.gates.heads.filter(h => !many || h.head === 0).map(headName)))];
  plot(card, gated.map(run => ({ name: run.title, mode: "markers", marker: { color: run.colour, size: many ? 7 : 10 },
    x: run.gates.heads.map(headName), y: run.gates.heads.map(h => h.memory_length), hovertemplate: "%{y:.1f} tokens" })),
    { yaxis: { type: "log", dtick: 1, title: { text: "memory length (tokens)" } },
      xaxis: { tickangle: -30, automargin: true, tickvals: named, ticktext: named.map(name => many ? name.split(",")[0] : name) } });
  for (const run of gated) {
    const shares = run.gates.heads.map(h => h.skipped_share).filter(known);
    if (!shares.length) continue;
    box.append(element("p", { class: "soft" }, `${run.title}: over windows of ${run.gates.length} tokens pruning skips ` +
      `${percent(shares.reduce((a, b) => a + b, 0) / shares.length)} of all causal blocks (at most ${percent(run.gates.most_skippable)} can be skipped at this length).`));
  }
}

// Lower triangle as rows of growing length → a square with blanks.
const square = rows => rows.map(row => row.concat(Array(rows.length - row.length).fill(null)));

function forgetMaps() {
  const mapped = runs.filter(run => run.gates?.maps?.length);
  if (!mapped.length) return;
  const box = section("Forgetting and attention, head by head",
    "F: the product of the gates between key (across) and query (down), 1 = nothing forgotten. A: the attention weights that result. Light to dark; as in Figure 3 of the paper.");
  for (const run of mapped) {
    const card = element("div", { class: "card" });
    card.append(element("b", {}, swatch(run), run.title));
    const grid = element("div", { class: "maps" });
    card.append(grid);
    box.append(card);
    for (const map of run.gates.maps) {
      const head = run.gates.heads.find(h => h.layer === map.layer && h.head === map.head);
      const memory = head?.memory_length ? `, memory ${fixed(head.memory_length, 1)}` : "";
      const pair = element("div", { class: "pair" });
      grid.append(pair);
      for (const [kind, values] of [["F", map.forget], ["A", map.attention]]) {
        if (!values?.length) continue;
        const z = square(values);
        // Weights of a row fall over orders of magnitude: the square root keeps the small ones visible.
        const shown = kind === "A" ? z.map(row => row.map(v => v === null ? null : Math.sqrt(v))) : z;
        plot(pair, [{ type: "heatmap", z: shown, x0: 0, dx: map.scale, y0: 0, dy: map.scale, zmin: 0, zmax: 1, colorscale: [[0, "#ffffff"], [0.5, "#7fb2d6"], [1, "#08306b"]],
          showscale: false, customdata: z, hovertemplate: "query %{y}, key %{x}: %{customdata:.3g}<extra></extra>" }],
          { margin: { l: 44, r: 8, t: 30, b: 30 }, hovermode: "closest", title: { text: `${kind}, layer ${map.layer} head ${map.head}${memory}`, font: { size: 12.5 } },
            yaxis: { autorange: "reversed" }, xaxis: {} }, "map");
      }
    }
  }
}

function samples() {
  const written = runs.filter(run => run.samples?.samples?.length || run.metrics.some(line => line.kind === "sample"));
  if (!written.length) return;
  const box = section("Samples", "Text that each model wrote; the prompt is grey.");
  for (const run of written) {
    const card = element("div", { class: "card" });
    card.append(element("b", {}, swatch(run), run.title));
    const own = run.samples?.samples?.length ? run.samples.samples : [run.metrics.filter(line => line.kind === "sample").pop()];
    for (const sample of own) {
      const text = element("pre");
      if (sample.prompt) text.append(element("span", { class: "prompt" }, sample.prompt));
      text.append(sample.text);
      card.append(text);
    }
    box.append(card);
  }
}

function configurations() {
  const box = section("Configuration");
  for (const run of runs) {
    const details = element("details", { class: "card" });
    details.append(element("summary", {}, swatch(run), `${run.title} (fox ${run.run.version}, ${shortCommit(run.run.commit)}, seed ${run.config.train.seed}, ${run.run.threads} threads)`),
      element("pre", {}, JSON.stringify(run.config, null, 2)));
    box.append(details);
  }
}

opening();
departures();
overview();
perTokenLoss();
firstWords();
trainingCurves();
gatesWhileTraining();
memoryLengths();
forgetMaps();
samples();
configurations();
