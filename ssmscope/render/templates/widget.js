// Notebook widget: choices of text, layer and head above the tokens, whose colours follow without the kernel.
const short = (value) => Number(value.toPrecision(3)).toString().replace("-", "−");

function render({model, el}) {
  const root = document.createElement("div");
  root.className = "ssmscope ssmscope-widget";
  root.dataset.lmSuppressShortcuts = "true";  // JupyterLab would move between cells at an arrow key.
  root.innerHTML = model.get("html");
  el.append(root);
  const texts = model.get("rows"), {shades, steps} = model.get("scale");
  const scores = model.get("scores").map((view) =>
    new Float32Array(view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength)));
  const group = `ssmscope-${Math.random()}`;
  const maps = !scores.length, sections = [...root.querySelectorAll("section")];
  const spans = sections.map((section) => [...section.querySelectorAll("[data-i]")].sort((a, b) => a.dataset.i - b.dataset.i));
  if (maps) startTokenMaps(root);
  const [textChoices, layerChoices, headChoices] = ["text", model.get("kind"), "head"].map((name) => {
    const set = document.createElement("fieldset");
    set.append(Object.assign(document.createElement("legend"), {textContent: name}));
    sections[0]?.before(set);
    return set;
  });

  const change = (values) => {
    for (const [name, value] of Object.entries(values)) model.set(name, value);
    model.save_changes();
  };
  // What is chosen; the first head of a layer that has none of that name.
  function chosen() {
    const rows = texts[model.get("text")] ?? [];
    const inLayer = rows.filter((row) => row.layer === model.get("layer"));
    return inLayer.find((row) => row.head === model.get("head")) ?? inLayer[0] ?? rows[0];
  }
  // The selected tokens' score in a row: their sum where scores are shares, else their mean.
  function score(row) {
    const at = texts[model.get("text")].indexOf(row), values = scores[model.get("text")], tokens = model.get("tokens");
    const sum = tokens.reduce((total, token) => total + values[at * row.length + token], 0);
    return row.summed ? sum : sum / tokens.length;
  }

  function choices(set, names, current, values, pick) {
    const had = set.contains(root.getRootNode().activeElement);
    set.hidden = names.length < 2;
    set.replaceChildren(set.firstChild, ...names.map((name, at) => {
      const label = Object.assign(document.createElement("label"), {className: "choice"});
      const input = Object.assign(document.createElement("input"), {type: "radio", checked: at === current});
      input.name = `${group}-${set.firstChild.textContent}`;
      input.addEventListener("change", () => pick(at));
      label.append(input, name, ...(values ? [" ", Object.assign(document.createElement("small"), {textContent: values[at]})] : []));
      return label;
    }));
    if (had) set.querySelector(":checked")?.focus();
  }

  function draw() {
    const text = model.get("text"), rows = texts[text] ?? [], row = chosen(), tokens = model.get("tokens");
    sections.forEach((section, at) => { section.hidden = at !== text; });
    choices(textChoices, sections.map((_, at) => `${at}`), text, null, (at) => change({tokens: [], text: at}));
    const layers = [...new Set(rows.map((each) => each.layer))], first = (layer) => rows.find((each) => each.layer === layer);
    const heads = rows.filter((each) => each.layer === row?.layer);
    const told = (each) => !maps && tokens.length ? short(score(each)) : "";
    choices(layerChoices, layers, layers.indexOf(row?.layer), layers.map((layer) => told(first(layer))), (at) =>
      change({layer: layers[at], head: (rows.find((each) => each.layer === layers[at] && each.head === row.head)
        ?? first(layers[at])).head}));
    choices(headChoices, heads.map((each) => each.head || "whole layer"), heads.indexOf(row), heads.map(told), (at) =>
      change({layer: row.layer, head: heads[at].head}));
    if (row) (maps ? drawMap : drawRow)(text, row, rows.indexOf(row), tokens);
  }

  function drawMap(text, row, at, tokens) {
    const select = sections[text].querySelector(".controls select");
    if (+select.value !== at) {
      select.value = at;
      select.dispatchEvent(new Event("change"));
    }
    const pinned = pinnedIn(text), wanted = tokens.length ? tokens[0] : pinned[0];
    if (tokens.length ? !pinned.includes(wanted) : pinned.length) spans[text][wanted].click();
  }
  const pinnedIn = (text) => [...sections[text].querySelectorAll(".pinned")].map((span) => +span.dataset.i);

  function drawRow(text, row, at, tokens) {
    const values = scores[text].subarray(at * row.length, (at + 1) * row.length);
    const count = row.signed ? 2 * steps + 1 : shades;
    spans[text].forEach((span, i) => {
      const unit = row.high > row.low ? Math.max(0, Math.min(1, (values[i] - row.low) / (row.high - row.low))) : 0.5;
      const shade = Math.round(unit * (count - 1)), outside = row.outside.includes(i);
      span.className = span.className.replace(/\b(v\d+|out|kept|against)\b/g, "").trim();
      delete span.dataset.l;
      if (outside) span.classList.add("out");
      else if (row.signed) span.dataset.l = shade - steps;
      else span.classList.add(`v${shade}`);
      span.classList.toggle("kept", row.marked.includes(i));
      span.classList.toggle("against", row.against.includes(i));
      span.setAttribute("aria-selected", tokens.includes(i));
      span.title = `position ${i}: ${short(values[i])}`;
    });
    if (!spans[text].some((span) => span.tabIndex === 0) && spans[text].length) spans[text][0].tabIndex = 0;
    const each = tokens.map((i) => `${i} “${spans[text][i].textContent}” ${short(values[i])}`).join(", ");
    const total = tokens.length > 1 ? `; ${row.summed ? "sum" : "mean"} ${short(score(row))}` : "";
    const bold = Object.assign(document.createElement("b"), {textContent: row.name});
    const remark = Object.assign(document.createElement("span"), {className: "remark", textContent: row.remark});
    const selected = tokens.length ? ` · selected: ${each}${total}` : " · click tokens, or move with the arrow keys and press Enter";
    sections[text].querySelector(".told").replaceChildren(bold, ` ${row.extent}`, remark, selected);
  }

  function toggle(i) {
    const tokens = model.get("tokens");
    change({tokens: tokens.includes(i) ? tokens.filter((each) => each !== i) : [...tokens, i].sort((a, b) => a - b)});
  }
  function focus(text, i) {
    const next = spans[text][Math.max(0, Math.min(spans[text].length - 1, i))];
    for (const span of spans[text]) span.tabIndex = span === next ? 0 : -1;
    next.focus();
  }
  sections.forEach((section, text) => {
    const follow = () => {
      const pinned = pinnedIn(text);
      if (`${pinned}` !== `${model.get("tokens")}`) change({tokens: pinned});
    };
    section.addEventListener("click", (event) => {
      const span = event.target.closest("[data-i]");
      if (maps) follow();
      else if (span) toggle(+span.dataset.i);
    });
    section.addEventListener("keydown", (event) => {
      if (maps) return follow();
      const span = event.target.closest("[data-i]"), step = {ArrowRight: 1, ArrowLeft: -1, ArrowDown: 1, ArrowUp: -1}[event.key];
      if (!span) return;
      if (step) focus(text, +span.dataset.i + step);
      else if (event.key === "Enter" || event.key === " ") toggle(+span.dataset.i);
      else if (event.key === "Escape") change({tokens: []});
      else return;
      event.preventDefault();
    });
  });
  const traits = ["text", "layer", "head", "tokens"].map((name) => `change:${name}`);
  for (const trait of traits) model.on(trait, draw);
  draw();
  return () => { for (const trait of traits) model.off(trait, draw); };
}
export default {render};
