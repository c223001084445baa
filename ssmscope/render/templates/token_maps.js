// Starts the maps within a document, or within an element, that it has not started before.
const startTokenMaps = (scope) => {
  const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const floats = (text) => new Float32Array(bytes(text).buffer);
  const whole32 = (text) => new Int32Array(bytes(text).buffer);
  const short = (weight) => Number(weight.toPrecision(3)).toString().replace("-", "−");
  const scheme = matchMedia("(prefers-color-scheme: dark)");
  for (const root of scope.querySelectorAll(".ssmscope-attention:not([data-live])")) {
    root.dataset.live = "";
    const data = JSON.parse(root.querySelector('script[type="application/json"]').textContent);
    for (const part of root.querySelectorAll(".live")) part.hidden = false;
    root.querySelectorAll("section").forEach((section, number) => {
      if (data.texts[number]) start(section, data.texts[number], data);
    });
  }

  function start(section, text, data) {
    const {queries, edges, maps} = text;
    const [select, own, told, end] = [".controls select", ".controls input", ".told", ".end"].map((s) =>
      section.querySelector(s));
    const canvas = section.querySelector("canvas"), frame = section.querySelector(".map");
    const spans = [];
    for (const span of section.querySelectorAll("[data-i]")) spans[+span.dataset.i] = span;
    const state = section.querySelector(".state");
    // A cell is a token, or a group of them in a pooled map; rows are numbered as the map's queries are.
    const cells = edges ? edges.length - 1 : text.length;
    const cellOf = new Int32Array(text.length), rowOf = new Int32Array(cells).fill(-1);
    for (let cell = 0; cell < cells; cell++)
      for (let i = edges ? edges[cell] : cell; i < (edges ? edges[cell + 1] : cell + 1); i++) cellOf[i] = cell;
    queries.forEach((query, row) => { rowOf[cellOf[query]] = row; });
    // The last cell that a query reads: its own, unless layers look ahead.
    const last = (row) => text.ahead ? cells - 1 : cellOf[queries[row]];
    const begins = [0];
    queries.forEach((query, row) => { begins.push(begins[row] + last(row) + 1); });
    const sunk = maps.some((map) => map.sink);
    const across = cells + (sunk ? 2 * unit() : 0), whole = queries.length === cells, largest = 420;
    // Of a long text several weights share a dot of the canvas, which shows the strongest.
    const fold = Math.max(1, Math.round(across / largest)), foldRows = whole ? fold : 1;
    const wide = Math.ceil(across / fold), tall = Math.ceil(queries.length / foldRows);
    let map, chosen = queries.length - 1, pinned = null, at = spans[queries[chosen]];

    function unit() { return Math.max(1, Math.ceil(cells * 0.02)); }
    function name(cell) {
      if (edges) return `tokens ${edges[cell]}–${edges[cell + 1] - 1}`;
      return `${cell} “${spans[cell].dataset.name ?? spans[cell].textContent}”`;
    }
    function weight(row, cell) { return map.values[begins[row] + cell] * map.scales[row] / 127; }
    function level(value, limit) {
      return limit > 0 ? Math.round(Math.max(-1, Math.min(1, value / limit)) * data.steps) : 0;
    }

    function pick(index) {
      const from = maps[index];
      map = {...from, values: new Int8Array(bytes(from.rows).buffer), scales: floats(from.scale), ends: floats(from.ends),
        sinks: from.sink && floats(from.sink), keys: whole32(from.keys), weights: floats(from.weights)};
      paint();
      show();
    }

    function paint() {
      canvas.width = wide;
      canvas.height = tall;
      canvas.style.width = `${Math.max(Math.min(largest, across * 16), whole ? 160 : largest)}px`;
      canvas.style.height = whole ? "auto" : `${Math.min(24 * queries.length, largest)}px`;
      if (whole) canvas.style.aspectRatio = `${wide} / ${tall}`;
      const strongest = new Float32Array(wide * tall).fill(NaN);
      const put = (row, column, value) => {
        const at = Math.floor(row / foldRows) * wide + Math.floor(column / fold);
        if (!(Math.abs(strongest[at]) >= Math.abs(value))) strongest[at] = value;
      };
      const before = sunk ? 2 * unit() : 0;
      for (let row = 0; row < queries.length; row++) {
        if (map.sinks) for (let column = 0; column < before / 2; column++) put(row, column, map.sinks[row]);
        for (let cell = 0; cell < begins[row + 1] - begins[row]; cell++) put(row, before + cell, weight(row, cell));
      }
      const colours = (scheme.matches ? data.dark : data.light).map((c) =>
        [1, 3, 5].map((i) => parseInt(c.slice(i, i + 2), 16)));
      const context = canvas.getContext("2d"), image = context.createImageData(wide, tall);
      strongest.forEach((value, at) => {
        if (!Number.isNaN(value)) image.data.set([...colours[level(value, map.end) + data.steps], 255], 4 * at);
      });
      context.putImageData(image, 0, 0);
    }

    function show(key = null) {
      const row = chosen, cell = cellOf[queries[row]];
      const limit = own.checked ? map.ends[row] : map.end;
      const largest = own.checked ? Math.max(map.scales[row], map.sinks ? Math.abs(map.sinks[row]) : 0) : map.largest;
      end.textContent = `limit ±${short(limit)}` + (largest > limit ? `, largest ${short(largest)}` : "");
      spans.forEach((span, i) => {
        const seen = cellOf[i] <= last(row);
        if (seen) span.dataset.l = level(weight(row, cellOf[i]), limit);
        else delete span.dataset.l;
        span.classList.toggle("after", !seen);
        span.classList.toggle("query", cellOf[i] === cell);
        span.classList.toggle("pinned", cellOf[i] === cell && pinned !== null);
        span.classList.toggle("key", key !== null && cellOf[i] === key);
      });
      if (state) {
        if (map.sinks) state.dataset.l = level(map.sinks[row], limit);
        else delete state.dataset.l;
      }
      place(key);
      tell(row, cell, key);
      const now = spans[queries[row]];
      at.tabIndex = -1;
      now.tabIndex = 0;
      at = now;
    }

    function place(key) {
      const before = sunk ? 2 * unit() : 0, [mark, column] = [".across", ".down"].map((s) => frame.querySelector(s));
      mark.style.top = `${100 * chosen / (tall * foldRows)}%`;
      mark.style.height = `${100 / (tall * foldRows)}%`;
      column.hidden = key === null;
      column.style.left = `${100 * (before + key) / (wide * fold)}%`;
      column.style.width = `${100 / (wide * fold)}%`;
    }

    // The strongest keys come with their weights; the weights of the others are known in steps of 1/127.
    function tell(row, cell, key) {
      const each = map.keys.length / queries.length, at = each * row;
      const of = (s) => s < 0 ? "state" : name(s);
      const strongest = [...map.keys.subarray(at, at + each)].map((s, i) => [s, map.weights[at + i]])
        .filter(([s]) => s > -2);
      const bold = document.createElement("b");
      bold.textContent = name(cell);
      const kept = (pinned === null ? "" : " (kept)") + (text.notes ? ` · ${text.notes[row]}` : "");
      const list = strongest.map(([s, value]) => `${of(s)} ${short(value)}`).join(", ");
      const exact = new Map(strongest).get(key);
      const pointed = key === null || key > last(row) ? ""
        : ` · ${name(key)}: ${exact === undefined ? `≈ ${short(weight(row, key))}` : short(exact)}`;
      told.replaceChildren(`${data.query} `, bold, `${kept}${pointed} · strongest: ${list}`);
    }

    function look(row, key = null) {
      if (row < 0) return;
      if (pinned === null) chosen = row;
      show(key);
    }
    function pin(row) {
      if (row < 0) return;
      pinned = pinned === row ? null : row;
      chosen = row;
      show();
    }
    function leave() {
      if (pinned !== null) chosen = pinned;
      show();
    }
    const tokenAt = (event) => event.target.closest("[data-i]");
    const rowAt = (span) => rowOf[cellOf[+span.dataset.i]];
    const tokens = section.querySelector(".tokens");
    tokens.addEventListener("mouseover", (event) => {
      const span = tokenAt(event);
      if (span) pinned === null ? look(rowAt(span)) : show(cellOf[+span.dataset.i]);
    });
    tokens.addEventListener("focusin", (event) => {
      const span = tokenAt(event);
      if (span && rowAt(span) !== chosen) pinned === null ? look(rowAt(span)) : show(cellOf[+span.dataset.i]);
    });
    tokens.addEventListener("mouseleave", leave);
    tokens.addEventListener("click", (event) => {
      const span = tokenAt(event);
      if (span) pin(rowAt(span));
    });
    tokens.addEventListener("keydown", (event) => {
      const span = tokenAt(event), step = {ArrowRight: 1, ArrowLeft: -1, ArrowDown: 1, ArrowUp: -1}[event.key];
      if (!span) return;
      if (step) {
        const next = Math.max(0, Math.min(queries.length - 1, rowAt(span) + step));
        spans[queries[next]].focus();
      } else if (event.key === "Enter" || event.key === " ") pin(rowAt(span));
      else if (event.key === "Escape") { pinned = null; show(); }
      else return;
      event.preventDefault();
    });
    function pointed(event) {
      const box = canvas.getBoundingClientRect(), before = sunk ? 2 * unit() : 0;
      const row = Math.floor((event.clientY - box.top) / box.height * tall * foldRows);
      const cell = Math.floor((event.clientX - box.left) / box.width * wide * fold) - before;
      const inside = Math.max(0, Math.min(queries.length - 1, row));
      return [inside, cell >= 0 && cell <= last(inside) ? cell : null];
    }
    frame.addEventListener("mousemove", (event) => look(...pointed(event)));
    frame.addEventListener("mouseleave", leave);
    frame.addEventListener("click", (event) => pin(pointed(event)[0]));
    select.addEventListener("change", () => pick(+select.value));
    own.addEventListener("change", () => show());
    scheme.addEventListener("change", paint);
    pick(0);
  }
};
