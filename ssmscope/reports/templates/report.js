(() => {
  "use strict";
  const {shades, steps} = JSON.parse(document.getElementById("_shades").textContent);
  const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const floats = (text) => new Float32Array(bytes(text).buffer);
  const number = (value) => Number(value.toPrecision(6)).toString().replace("-", "−");
  const brief = (value) => Number(value.toPrecision(3)).toString().replace("-", "−");
  const fixed = (value) => value.toFixed(3).replace("-", "−");

  function make(name, properties = {}, ...children) {
    const {dataset, ...rest} = properties, element = Object.assign(document.createElement(name), rest);
    Object.assign(element.dataset, dataset);
    element.append(...children);
    return element;
  }

  for (const button of document.querySelectorAll("button.copy")) {
    button.hidden = false;
    const code = button.parentElement.querySelector("code"), said = button.parentElement.querySelector(".copied");
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(code.textContent);
        said.textContent = "copied";
      } catch {  // no clipboard here: the text is selected for the reader's own copying
        getSelection().selectAllChildren(code);
        said.textContent = "selected";
      }
    });
  }

  function fill(details) {
    const template = details.querySelector("template");
    if (template) template.replaceWith(document.importNode(template.content, true));
  }
  const asked = document.querySelectorAll("details.on-request");
  for (const details of asked) details.addEventListener("toggle", () => { if (details.open) fill(details); });

  // On paper everything that is folded away is open.
  let opened = [];
  addEventListener("beforeprint", () => {
    asked.forEach(fill);
    opened = [...document.querySelectorAll("details:not([open])")];
    for (const details of opened) details.open = true;
  });
  addEventListener("afterprint", () => {
    for (const details of opened) details.open = false;
  });

  const read = new Map();
  function attention({anchor, text}) {
    if (!read.has(anchor)) {
      const root = document.getElementById(anchor);
      const island = root && root.querySelector('script[type="application/json"]');
      read.set(anchor, island ? JSON.parse(island.textContent).texts : []);
    }
    return read.get(anchor)[text] || null;
  }

  for (const root of document.querySelectorAll(".heat")) explore(root);

  function explore(root) {
    const islands = [...root.querySelectorAll('script[type="application/json"]')];
    const heads = islands.map((island) => JSON.parse(island.textContent));
    const controls = root.querySelector(".controls"), blocks = root.querySelector(".blocks");
    const state = {layer: 0, text: 0, first: 0, second: -1};

    function choice(label, names, chosen, change) {
      const select = make("select");
      names.forEach(([value, name]) => select.append(make("option", {value, textContent: name, dir: "auto"})));
      select.value = chosen;
      select.addEventListener("change", () => change(+select.value));
      const holder = make("label", {hidden: names.length < 2}, `${label} `, select);
      controls.append(holder);
      return {select, holder};
    }
    const title = ({model, variant}) => `${model} · ${variant}`;
    const models = [...new Set(heads.map(({model}) => model))];
    const variantsOf = (model) => heads.map((head, at) => [at, head]).filter(([, head]) => head.model === model);

    const model = choice("model", models.map((name, at) => [at, name]), 0, (at) => {
      const same = variantsOf(models[at]), now = heads[state.first].variant;
      state.first = (same.find(([, head]) => head.variant === now) ?? same[0])[0];
      fit();
    });
    const variant = choice("score", [], 0, (at) => { state.first = at; fit(); });
    choice("compare with", [[-1, "nothing"], ...heads.map((head, at) => [at, title(head)])], -1, (at) => {
      state.second = at;
      fit();
    }).holder.hidden = heads.length < 2;
    const text = choice("text", [], 0, (at) => { state.text = at; fit(); });
    const turn = (label, step) => {
      const button = make("button", {type: "button", textContent: step < 0 ? "←" : "→", ariaLabel: label});
      button.addEventListener("click", () => { state.text += step; fit(); });
      controls.append(button);
      return button;
    };
    const before = turn("previous text", -1), next = turn("next text", 1);
    const layer = choice(heads[0].of, [], 0, (at) => { state.layer = at; fit(); });

    function offer({select, holder}, names, chosen) {
      const wanted = JSON.stringify(names);
      if (select.dataset.names !== wanted) {
        select.dataset.names = wanted;
        select.replaceChildren(...names.map(([value, name]) =>
          make("option", {value, textContent: name, dir: "auto"})));
      }
      select.value = chosen;
      holder.hidden = names.length < 2;
    }

    function fit() {
      const head = heads[state.first];
      state.text = Math.max(0, Math.min(state.text, head.texts.length - 1));
      state.layer = Math.min(state.layer, head.rows.length - 1);
      offer(variant, variantsOf(head.model).map(([at, one]) => [at, one.variant]), state.first);
      offer(text, head.texts.map((one, at) => [at, `${at}. ${one.name}`]), state.text);
      offer(layer, head.rows.map((name, at) => [at, name]), state.layer);
      model.select.value = models.indexOf(head.model);
      before.hidden = next.hidden = head.texts.length < 2;
      before.disabled = state.text === 0;
      next.disabled = state.text === head.texts.length - 1;
      const shown = [state.first, state.second].filter((at) => at >= 0);
      blocks.replaceChildren(legend(head), ...shown.map((at) => block(heads[at], state)));
    }

    controls.hidden = false;
    fit();
  }

  function legend(head) {
    return make("p", {className: "legend"},
      make("span", {textContent: head.scoreName}),
      ...head.scales.map(([low, high, kind]) =>
        make("span", {className: `scale ${kind}`}, `${low} `, make("i"), ` ${high}`)),
      make("span", {}, make("b", {className: "kept", textContent: "underlined"}), ` ${head.marked}`),
      make("span", {}, make("span", {className: "special", textContent: "slanted"}), " special tokens"),
      make("span", {className: "hint", textContent: "hover over a token or use the arrow keys to see its scores; "
        + "click or press Enter to see what it attends to, Escape to release"}));
  }

  // One text of one result: its tokens in colour, the scores of the one pointed at, and what that attends to.
  function block(result, {layer, text: index}) {
    const text = result.texts[index], holder = make("section", {className: "block"});
    if (!text) {
      holder.append(make("p", {className: "note", textContent: `${result.model} has no text ${index} here.`}));
      return holder;
    }
    const row = Math.min(layer, result.rows.length - 1), count = text.tokens.length, names = result.rows;
    const scores = floats(text.scores), special = new Set(text.special), out = text.out.map((each) => new Set(each));
    const rank = new Map(text.kept[row].map((at, place) => [at, place + 1])), against = new Set(text.against[row]);
    // The colour of a token in a row: a class, or of a row around zero its level.
    const dress = (element, of, at) => {
      if (out[of].has(at)) return element.classList.add("special");
      const low = text.low[of], span = text.high[of] - low, most = text.signed[of] ? 2 * steps : shades - 1;
      const unit = Math.max(0, Math.min(1, span > 0 ? (scores[of * count + at] - low) / span : 0.5));
      if (text.signed[of]) element.dataset.l = Math.round(unit * most) - steps;
      else element.classList.add(`v${Math.round(unit * most)}`);
    };
    holder.append(make("p", {className: "answer"},
      make("b", {textContent: result.model, dir: "auto"}), ` · ${result.variant} · answer `,
      make("b", {textContent: `“${text.answer}”`, dir: "auto"}), ` ${text.p}`,
      make("span", {textContent: `${names[row]}: ${text.range[row]}`}), make("span", {textContent: text.about})));
    const tokens = make("p", {className: "tokens", dir: "auto", role: "group",
      ariaLabel: `tokens of text ${index}`});
    const spans = text.tokens.map((token, at) => {
      if (text.gaps[at] === "1") tokens.append(" ");
      const span = make("span", {textContent: token, tabIndex: at ? -1 : 0, role: "button", dataset: {i: at}});
      span.classList.toggle("kept", rank.has(at));
      span.classList.toggle("against", against.has(at));
      span.classList.toggle("special", special.has(at));
      dress(span, row, at);
      span.setAttribute("aria-pressed", "false");
      tokens.append(span, make("wbr"));
      return span;
    });
    const told = make("p", {className: "told", role: "status"}), strip = make("ol", {className: "strip"});
    const attended = make("div", {className: "attended", hidden: true});
    holder.append(tokens);
    if (count < text.length) holder.append(make("p", {className: "note",
      textContent: `the first ${count.toLocaleString("en")} of ${text.length.toLocaleString("en")} tokens; `
        + "the result files have all"}));
    holder.append(told, strip, attended);
    let at = -1, pinned = -1;

    function show(i) {
      if (at >= 0) spans[at].classList.remove("at");
      const from = spans[at] ?? spans[0];
      at = i;
      spans[at].classList.add("at");
      from.tabIndex = -1;
      spans[at].tabIndex = 0;
      const place = rank.has(at) ? ` · underlined, rank ${rank.get(at)}` : "";
      const kind = special.has(at) ? " · special token" : "";
      told.replaceChildren(make("b", {textContent: `“${text.tokens[at]}”`, dir: "auto"}),
        ` position ${at}${place}${kind} · ${names[row]} ${number(scores[row * count + at])}`);
      strip.replaceChildren(...names.map((name, of) => {
        const cell = make("li", {}, make("small", {textContent: name}), number(scores[of * count + at]));
        cell.classList.toggle("now", of === row);
        dress(cell, of, at);
        return cell;
      }));
    }

    function pin(i) {
      if (pinned >= 0) {
        spans[pinned].classList.remove("pinned");
        spans[pinned].setAttribute("aria-pressed", "false");
      }
      pinned = pinned === i ? -1 : i;
      attended.hidden = pinned < 0;
      if (pinned < 0) return;
      spans[pinned].classList.add("pinned");
      spans[pinned].setAttribute("aria-pressed", "true");
      attend(pinned);
    }

    function attend(i) {
      const found = text.attention.map((link) => [link, attention(link)]).filter(([, maps]) => maps);
      if (!found.length) {
        attended.replaceChildren(make("p", {className: "note",
          textContent: "The report has no attention maps of this model and text."}));
        return;
      }
      const select = make("select", {ariaLabel: "attention map"});
      found.forEach(([link, {maps}], f) => maps.forEach((map, m) => select.append(
        make("option", {value: `${f} ${m}`, textContent: `${link.label} · ${map.name}`}))));
      // The map of the layer that is shown comes first, where there is one.
      const wanted = names[row];
      const same = [...select.options].find((option) => option.textContent.endsWith(` · ${wanted}`));
      if (same) select.value = same.value;
      const shown = make("div");
      const update = () => {
        const [f, m] = select.value.split(" ").map(Number);
        shown.replaceChildren(...weights(found[f][1], m, i));
      };
      select.addEventListener("change", update);
      attended.replaceChildren(make("p", {className: "answer"}, "what ",
        make("b", {textContent: `“${text.tokens[i]}”`, dir: "auto"}), " takes from each token ", select), shown);
      update();
    }

    // A row of a map over the text; the weights are packed as the attention maps of the page pack them.
    function weights({length, queries, edges, maps, ahead}, m, i) {
      const map = maps[m], cells = edges ? edges.length - 1 : length, cellOf = new Int32Array(length);
      for (let cell = 0; cell < cells; cell++)
        for (let s = edges ? edges[cell] : cell; s < (edges ? edges[cell + 1] : cell + 1); s++) cellOf[s] = cell;
      const line = queries.findIndex((query) => cellOf[query] === cellOf[i]);
      if (line < 0) return [make("p", {className: "note", textContent: "This map has no row for that token."})];
      const last = (query) => ahead ? cells - 1 : cellOf[query];
      const begin = queries.slice(0, line).reduce((sum, query) => sum + last(query) + 1, 0);
      const packed = new Int8Array(bytes(map.rows).buffer), scale = floats(map.scale)[line];
      const weight = (s) => packed[begin + cellOf[s]] * scale / 127;
      const flow = make("p", {className: "tokens", dir: "auto"});
      text.tokens.forEach((token, s) => {
        if (text.gaps[s] === "1") flow.append(" ");
        const seen = cellOf[s] <= last(i), span = make("span", {textContent: token});
        if (seen) {
          span.dataset.l = scale > 0 ? Math.round(weight(s) / scale * steps) : 0;
          span.title = `position ${s}: ${brief(weight(s))}`;
        } else span.className = "after";
        if (s === i) span.classList.add("pinned");
        flow.append(span, make("wbr"));
      });
      const each = 4 * (queries.length ? bytes(map.keys).length / queries.length / 4 : 0);
      const keys = new Int32Array(bytes(map.keys).buffer, each * line, each / 4);
      const exact = new Float32Array(bytes(map.weights).buffer, each * line, each / 4);
      const place = (key) => key < 0 ? "state" : edges ? edges[key] : key;
      const strongest = [...keys].map((key, at) => [place(key), exact[at], key]).filter(([, , key]) => key > -2);
      const said = strongest.flatMap(([s, value], place) => [place ? ", " : "",
        make("bdi", {textContent: s === "state" ? "the state before the text" : `“${text.tokens[s]}”`}),
        ` ${s === "state" ? "" : `(${s}) `}${brief(value)}`]);
      const end = fixed(scale);
      return [flow, make("p", {className: "told"}, "strongest: ", ...said),
        make("p", {className: "legend"},
          make("span", {className: "scale around"}, `−${end} `, make("i"), ` ${end}, the largest of the row`))];
    }

    const tokenAt = (event) => event.target.closest("[data-i]");
    tokens.addEventListener("mouseover", (event) => {
      const span = tokenAt(event);
      if (span) show(+span.dataset.i);
    });
    tokens.addEventListener("focusin", (event) => {
      const span = tokenAt(event);
      if (span && +span.dataset.i !== at) show(+span.dataset.i);
    });
    tokens.addEventListener("click", (event) => {
      const span = tokenAt(event);
      if (span) pin(+span.dataset.i);
    });
    tokens.addEventListener("keydown", (event) => {
      const span = tokenAt(event), forward = getComputedStyle(tokens).direction === "rtl" ? -1 : 1;
      if (!span) return;
      const step = {ArrowRight: forward, ArrowLeft: -forward, ArrowDown: 1, ArrowUp: -1}[event.key];
      const i = +span.dataset.i;
      if (step) spans[Math.max(0, Math.min(count - 1, i + step))].focus();
      else if (event.key === "Home") spans[0].focus();
      else if (event.key === "End") spans[count - 1].focus();
      else if (event.key === "Enter" || event.key === " ") pin(i);
      else if (event.key === "Escape" && pinned >= 0) pin(pinned);
      else return;
      event.preventDefault();
    });
    if (text.kept[row].length) show(text.kept[row][0]);
    return holder;
  }
})();
