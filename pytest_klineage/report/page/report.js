"use strict";
/* Sorting, curves, bars and details of a report. Recorded text only ever becomes text nodes. */
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const details = new Map(data.details.map((item) => [item.key, item]));
  const figures = new Map(data.figures.map((item) => [item.key, item]));
  const SVG = "http://www.w3.org/2000/svg";
  const svg = (name, attributes = {}, parent = null, text = null) => {
    const node = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== null) node.textContent = text;
    if (parent) parent.append(node);
    return node;
  };
  const html = (name, properties = {}, parent = null) => {
    const node = Object.assign(document.createElement(name), properties);
    if (parent) parent.append(node);
    return node;
  };
  const ruler = document.createElement("canvas").getContext("2d");
  ruler.font = '12px system-ui, -apple-system, "Segoe UI", "Liberation Sans", sans-serif';
  const wide = (texts) => Math.max(0, ...[...texts].map((text) => ruler.measureText(text).width));
  const short = (value) => {
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size >= 1e5 || size < 1e-4) return value.toExponential(0);
    return String(Number(value.toPrecision(3)));
  };

  /* ---- theme ---------------------------------------------------------------------------------------------------- */
  const THEMES = ["system", "light", "dark"];
  const theme = document.getElementById("theme");
  const stored = () => { try { return localStorage.getItem("klineage-theme") || "system"; } catch { return "system"; } };
  const show = (name) => {
    if (name === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = name;
    theme.textContent = `theme: ${name}`;
    try { localStorage.setItem("klineage-theme", name); } catch { /* a page from a file may not remember */ }
  };
  theme.hidden = false;
  show(THEMES.includes(stored()) ? stored() : "system");
  theme.addEventListener("click", () => {
    const now = document.documentElement.dataset.theme || "system";
    show(THEMES[(THEMES.indexOf(now) + 1) % THEMES.length]);
  });

  /* ---- sorting -------------------------------------------------------------------------------------------------- */
  const compare = (one, other) => {
    const [a, b] = [Number(one), Number(other)];
    return Number.isNaN(a) || Number.isNaN(b) ? one.localeCompare(other, undefined, { numeric: true }) : a - b;
  };
  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      for (const other of heads) other.setAttribute("aria-sort", "none");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const body = table.tBodies[0];
      const rows = [...body.rows].map((row) => [row, row.cells[column].dataset.order]);
      rows.sort(([, a], [, b]) => {
        if (a === undefined || b === undefined) return (a === undefined) - (b === undefined);
        return (down ? -1 : 1) * compare(a, b);
      });
      body.append(...rows.map(([row]) => row));
    }));
  }

  /* ---- details -------------------------------------------------------------------------------------------------- */
  const dialog = document.getElementById("detail");
  const body = document.getElementById("detail-body");
  const open = (key) => {
    const item = details.get(key);
    if (!item) return;
    document.getElementById("detail-title").textContent = item.title;
    body.replaceChildren();
    const list = html("dl", {}, body);
    for (const [name, value] of item.facts) {
      html("dt", { textContent: name }, list);
      html("dd", { textContent: value }, list);
    }
    for (const block of item.blocks) {
      const part = html("details", { open: true }, body);
      html("summary", { textContent: block.caption }, part);
      html("pre", { textContent: block.text, tabIndex: 0 }, part);
    }
    if (!dialog.open) dialog.showModal();
    dialog.scrollTop = 0;
  };
  document.getElementById("detail-close").addEventListener("click", () => dialog.close());
  dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
  document.addEventListener("click", (event) => {
    const link = event.target.closest("button[data-detail]");
    if (link) open(link.dataset.detail);
  });

  /* ---- scales --------------------------------------------------------------------------------------------------- */
  const logTicks = (low, high) => {
    const spread = high - low;
    const steps = spread < 0.35 ? [1, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.8, 2, 2.5, 3, 3.5, 4, 4.5, 5, 6, 7, 8, 9]
      : spread < 0.8 ? [1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8] : spread < 2.2 ? [1, 2, 5] : [1];
    const found = [];
    for (let power = Math.floor(low); power <= Math.ceil(high); power += spread > 7 ? 2 : 1) {
      for (const step of steps) {
        const value = power + Math.log10(step);
        if (value >= low - 1e-9 && value <= high + 1e-9) found.push([value, step * 10 ** power]);
      }
    }
    return found.length >= 2 ? found : plainTicks(10 ** low, 10 ** high, 4).map(([value]) => [Math.log10(value), value]);
  };
  const plainTicks = (low, high, count = 6) => {
    const raw = (high - low) / count;
    const base = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].find((factor) => factor * base >= raw) * base;
    const found = [];
    for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + step * 1e-6; value += step) found.push([value, value]);
    return found;
  };
  const padded = (values, share) => {
    const [low, high] = [Math.min(...values), Math.max(...values)];
    const room = (high - low || Math.abs(high) || 1) * share;
    return [low - room, high + room];
  };
  const colour = (series) => `c${series.colour % 6}`;

  /* ---- marks ---------------------------------------------------------------------------------------------------- */
  const drawMark = (kind, x, y, parent, className = "") => {
    const r = 4.5;
    if (kind === "scored") return svg("circle", { cx: x, cy: y, r, class: `fill halo ${className}` }, parent);
    if (kind === "failed") {
      return svg("path", { d: `M${x},${y - r} L${x + r},${y + r * 0.8} L${x - r},${y + r * 0.8} Z`, class: "failed" }, parent);
    }
    return svg("path", { d: `M${x - r},${y - r} L${x + r},${y + r} M${x + r},${y - r} L${x - r},${y + r}`, class: kind }, parent);
  };
  const WORDS = { scored: "right and timed", wrapper: "wrapper, not counted", failed: "failed", rejected: "refused step" };
  const legend = (figure, parent, withNames) => {
    const list = html("ul", { className: "legend" }, parent);
    const entry = (text, paint) => {
      const item = html("li", {}, list);
      const icon = svg("svg", { viewBox: "0 0 14 14", "aria-hidden": "true" }, item);
      paint(icon);
      item.append(text);
    };
    if (withNames) {
      for (const series of new Map(figure.series.map((one) => [one.name, one])).values()) {
        entry(series.name, (icon) => svg("rect", { x: 1, y: 4, width: 12, height: 6, class: `fill ${colour(series)}` }, icon));
      }
    }
    const marks = new Set(figure.series.flatMap((series) => series.points.map((point) => point.mark)));
    if (marks.size > 1) {
      for (const mark of Object.keys(WORDS).filter((name) => marks.has(name))) {
        entry(WORDS[mark], (icon) => { const g = svg("g", { class: colour(figure.series[0]) }, icon); drawMark(mark, 7, 7, g); });
      }
    }
    if (!list.children.length) list.remove();
  };
  const tipOf = (host) => {
    const tip = html("div", { className: "tip", hidden: true }, host);
    tip.setAttribute("role", "status");
    return {
      show(text, x, y) {
        tip.textContent = text;
        tip.hidden = false;
        const left = Math.max(0, Math.min(x - tip.offsetWidth / 2, host.clientWidth - tip.offsetWidth));
        tip.style.left = `${left}px`;
        tip.style.top = `${y - tip.offsetHeight - 12 < -20 ? y + 14 : y - tip.offsetHeight - 12}px`;
      },
      hide() { tip.hidden = true; },
    };
  };

  /* ---- bars ----------------------------------------------------------------------------------------------------- */
  const BAR = 15, GAP = 3, GROUP = 16;
  const bars = (host, figure) => {
    host.replaceChildren();
    if (figure.series.length > 1) legend({ series: figure.series.map((one) => ({ ...one, points: [] })) }, host, true);
    const width = host.clientWidth;
    const longest = wide(figure.categories) + 16;
    const aside = longest < width * 0.42;
    const left = aside ? longest : 6, right = 64;
    const rowsOf = figure.categories.map((_, index) => figure.series.flatMap((series) =>
      series.points.filter((point) => point.x === index).map((point) => ({ series, point }))));
    const height = rowsOf.reduce((sum, rows) => sum + rows.length * (BAR + GAP) + GROUP + (aside ? 0 : 17), 0) + 44;
    const values = figure.series.flatMap((series) => series.points.flatMap((point) =>
      [point.y, point.low, point.high].filter((value) => value > 0).map(Math.log10)));
    const [low, high] = padded([...values, 0], 0.06);
    const at = (value) => left + (Math.log10(value) - low) / (high - low) * (width - left - right);
    const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "group", "aria-label": figure.title }, host);
    const tip = tipOf(host);
    const bottom = height - 40;
    let beyond = -Infinity;
    for (const [value, label] of logTicks(low, high)) {
      const x = left + (value - low) / (high - low) * (width - left - right);
      const text = `${short(label)}x`;
      const tick = svg("g", { class: "tick" }, root);
      svg("line", { x1: x, x2: x, y1: 4, y2: bottom }, tick);
      if (x - text.length * 3.4 < beyond) continue;
      svg("text", { x, y: bottom + 16, "text-anchor": "middle" }, tick, text);
      beyond = x + text.length * 3.4 + 8;
    }
    svg("text", { x: left, y: height - 6, class: "soft" }, root, `${figure.y_label}, logarithmic; bars begin at 1x: the ${figure.parity}`);
    svg("line", { x1: at(1), x2: at(1), y1: 4, y2: bottom, class: "parity" }, root);
    let y = 8;
    rowsOf.forEach((rows, index) => {
      const middle = y + (rows.length * (BAR + GAP) - GAP) / 2;
      if (aside) svg("text", { x: left - 10, y: middle + 4, "text-anchor": "end" }, root, figure.categories[index]);
      else { svg("text", { x: left, y: y + 10, class: "over" }, root, figure.categories[index]); y += 17; }
      for (const { series, point } of rows) { bar(root, series, point, y, at, tip); y += BAR + GAP; }
      y += GROUP;
    });
  };
  const bar = (root, series, point, y, at, tip) => {
    const hot = svg("g", { class: `hot ${colour(series)}`, tabindex: 0, role: "button", "aria-label": point.text }, root);
    const middle = y + BAR / 2, one = at(1);
    let end = one;
    if (point.y === null) {
      drawMark("wrapper", one + 12, middle, hot);
      svg("text", { x: one + 22, y: middle + 4, class: "bad" }, hot, point.text.split(": ").slice(1).join(": "));
    } else {
      const value = at(point.y);
      svg("rect", { x: Math.min(one, value), y, width: Math.max(Math.abs(value - one), 1.5), height: BAR, class: "bar fill", rx: 1 }, hot);
      end = value;
      if (point.low !== null) {
        const [a, b] = [at(point.low), at(point.high)];
        svg("path", { d: `M${a},${middle} H${b} M${a},${middle - 4} v8 M${b},${middle - 4} v8`, class: "whisker" }, hot);
        end = Math.max(value, b);
      }
      svg("text", { x: Math.max(end, one) + 7, y: middle + 4 }, hot, `${point.y >= 100 ? point.y.toFixed(0) : point.y >= 0.1 ? point.y.toFixed(2) : point.y.toPrecision(2)}x${series.name.includes(", ") ? series.name.slice(series.name.indexOf(",")) : ""}`);
    }
    const tell = () => tip.show(point.text, end, y + root.getBoundingClientRect().top - root.parentElement.getBoundingClientRect().top);
    hot.addEventListener("pointerenter", tell);
    hot.addEventListener("focus", tell);
    hot.addEventListener("pointerleave", () => tip.hide());
    hot.addEventListener("blur", () => tip.hide());
    hot.addEventListener("click", () => open(point.detail));
    hot.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") { event.preventDefault(); open(point.detail); }
    });
  };

  /* ---- curves --------------------------------------------------------------------------------------------------- */
  class Curves {
    constructor(host, figure) {
      this.host = host;
      this.figure = figure;
      this.scale = figure.y_log ? Math.log10 : (value) => value;
      this.points = figure.series.flatMap((series) => series.points.map((point) => ({ series, point })));
      const heights = this.points.flatMap(({ point }) => [point.y, point.low, point.high])
        .filter((value) => value !== null && (!figure.y_log || value > 0)).map(this.scale);
      if (figure.parity || !heights.length) heights.push(this.scale(1));
      const across = this.points.map(({ point }) => point.x);
      const [x0, x1] = figure.categories.length ? [-0.3, Math.max(figure.categories.length - 1, ...across) + 0.3]
        : padded([0, ...across], 0.03);
      const [y0, y1] = padded(heights, 0.08);
      this.whole = { x0, x1, y0, y1 };
      this.view = { ...this.whole };
      this.lane = this.points.some(({ point }) => point.y === null) ? 26 : 0;
      this.current = -1;
      this.build();
    }

    build() {
      this.host.replaceChildren();
      const tools = html("div", { className: "tools" }, this.host);
      const tool = (text, label, act) => {
        const button = html("button", { type: "button", textContent: text, title: label }, tools);
        button.setAttribute("aria-label", `${label}: ${this.figure.title}`);
        button.addEventListener("click", act);
      };
      tool("+", "Zoom in", () => this.zoom(0.6));
      tool("\u2212", "Zoom out", () => this.zoom(1 / 0.6));
      tool("Reset", "Show everything", () => this.reset());
      this.plot = html("div", { className: "plot", tabIndex: 0 }, this.host);
      this.plot.setAttribute("role", "application");
      this.plot.setAttribute("aria-label", `${this.figure.title}. Arrow keys walk along the points, Enter opens one, plus and minus zoom, `
        + "shift with arrows moves, 0 shows everything.");
      this.legendHost = html("div", {}, this.host);
      this.tip = tipOf(this.host);
      this.plot.addEventListener("keydown", (event) => this.key(event));
      this.plot.addEventListener("blur", () => { this.current = -1; this.tip.hide(); this.draw(); });
      this.plot.addEventListener("pointerdown", (event) => this.press(event));
      this.plot.addEventListener("pointermove", (event) => this.move(event));
      this.plot.addEventListener("pointerup", (event) => this.release(event));
      this.plot.addEventListener("pointerleave", () => { if (!this.drag) { this.current = -1; this.tip.hide(); this.ring(); } });
      this.plot.addEventListener("dblclick", () => this.reset());
      this.draw();
    }

    layout() {
      const width = this.host.clientWidth;
      const names = new Map(this.figure.series.filter((one) => one.line !== "none").map((one) => [one.name, one]));
      this.direct = width >= 400 && names.size > 1 && names.size < 9;
      const rotated = this.figure.categories.length > 0;
      const deep = rotated ? Math.min(118, wide(this.figure.categories) * 0.62 + 24) : 22;
      this.box = { left: 50, right: width - (this.direct ? wide(names.keys()) * 1.08 + 18 : 14), top: 24, width };
      this.box.bottom = this.box.top + 230;
      this.height = this.box.bottom + this.lane + deep + 20;
      this.names = names;
    }

    x(value) { const { x0, x1 } = this.view; return this.box.left + (value - x0) / (x1 - x0) * (this.box.right - this.box.left); }
    y(value) {
      if (value === null) return this.box.bottom + this.lane - 9;
      const { y0, y1 } = this.view;
      return this.box.bottom - (this.scale(value) - y0) / (y1 - y0) * (this.box.bottom - this.box.top);
    }

    draw() {
      this.layout();
      const { left, right, top, bottom, width } = this.box;
      this.plot.replaceChildren();
      const root = this.root = svg("svg", { viewBox: `0 0 ${width} ${this.height}`, height: this.height, "aria-hidden": "true" }, this.plot);
      const id = `clip-${this.figure.key}`;
      const clip = svg("clipPath", { id }, svg("defs", {}, root));
      svg("rect", { x: left - 6, y: top - 6, width: right - left + 12, height: bottom - top + this.lane + 8 }, clip);
      this.axes(root);
      const inner = svg("g", { "clip-path": `url(#${id})` }, root);
      if (this.figure.parity && this.y(1) > top && this.y(1) < bottom) {
        svg("line", { x1: left, x2: right, y1: this.y(1), y2: this.y(1), class: "parity" }, inner);
      }
      for (const series of this.figure.series) this.path(inner, series);
      for (const { series, point } of this.points) this.mark(inner, series, point);
      if (this.direct) this.label(root);
      this.legendHost.replaceChildren();
      legend(this.figure, this.legendHost, !this.direct && this.names.size > 1);
      this.overlay = svg("g", {}, root);
      this.ring();
    }

    axes(root) {
      const { left, right, top, bottom } = this.box;
      const base = bottom + this.lane;
      for (const [value, label] of (this.figure.y_log ? logTicks : plainTicks)(this.view.y0, this.view.y1)) {
        const y = bottom - (value - this.view.y0) / (this.view.y1 - this.view.y0) * (bottom - top);
        const tick = svg("g", { class: "tick" }, root);
        svg("line", { x1: left, x2: right, y1: y, y2: y }, tick);
        svg("text", { x: left - 7, y: y + 4, "text-anchor": "end" }, tick, short(label));
      }
      const ticks = this.figure.categories.length
        ? this.figure.categories.map((name, index) => [index, name]) : plainTicks(this.view.x0, this.view.x1, right - left < 360 ? 4 : 7);
      for (const [value, label] of ticks) {
        const x = this.x(value);
        if (x < left - 1 || x > right + 1 || (typeof label === "number" && label < -1e-9)) continue;
        const tick = svg("g", { class: "tick" }, root);
        svg("line", { x1: x, x2: x, y1: base, y2: base + 5 }, tick);
        if (typeof label === "number") svg("text", { x, y: base + 18, "text-anchor": "middle" }, tick, short(label));
        else svg("text", { x: x + 4, y: base + 14, "text-anchor": "end", transform: `rotate(-38 ${x + 4} ${base + 14})` }, tick, label);
      }
      svg("path", { d: `M${left},${top} V${base} H${right}`, fill: "none", class: "axis" }, root);
      if (this.lane) {
        svg("line", { x1: left, x2: right, y1: bottom, y2: bottom, class: "axis", "stroke-dasharray": "2 3" }, root);
        svg("text", { x: left - 7, y: base - 5, "text-anchor": "end", class: "soft" }, root, "none");
      }
      svg("text", { x: right, y: this.height - 4, "text-anchor": "end", class: "soft" }, root, `${this.figure.x_label} \u2192`);
      svg("text", { x: left - 40, y: 11, class: "soft" }, root, `\u2191 ${this.figure.y_label}${this.figure.y_log ? ", logarithmic" : ""}`);
    }

    path(parent, series) {
      const points = series.points.filter((point) => point.y !== null);
      if (series.line === "none" || !points.length) return;
      const steps = series.line === "steps";
      const d = points.map((point, index) => (index === 0 ? `M${this.x(point.x)},${this.y(point.y)}`
        : steps ? `H${this.x(point.x)} V${this.y(point.y)}` : `L${this.x(point.x)},${this.y(point.y)}`)).join(" ");
      svg("path", { d, class: `line stroke ${colour(series)}` }, parent);
    }

    mark(parent, series, point) {
      const group = svg("g", { class: colour(series) }, parent);
      const [x, y] = [this.x(point.x), this.y(point.y)];
      if (point.low !== null && point.y !== null) svg("path", { d: `M${x},${this.y(point.low)} V${this.y(point.high)}`, class: "stroke" }, group);
      if (series.line === "steps" && point === series.points[series.points.length - 1]) return;
      drawMark(point.mark, x, y, group);
    }

    label(root) {
      const last = [...this.names.values()].map((series) => {
        const points = series.points.filter((point) => point.y !== null);
        return points.length ? { series, y: this.y(points[points.length - 1].y) } : null;
      }).filter(Boolean).sort((one, other) => one.y - other.y);
      let before = -Infinity;
      for (const item of last) {
        const y = Math.max(Math.min(Math.max(item.y, this.box.top), this.box.bottom), before + 14);
        svg("text", { x: this.box.right + 10, y: y + 4, class: `name ${colour(item.series)}` }, root, item.series.name);
        before = y;
      }
    }

    ring() {
      this.overlay.replaceChildren();
      const found = this.points[this.current];
      if (found) svg("circle", { cx: this.x(found.point.x), cy: this.y(found.point.y), r: 8, class: "ring" }, this.overlay);
    }

    tell() {
      const { point } = this.points[this.current];
      this.ring();
      this.tip.show(point.text, this.x(point.x), this.y(point.y) + this.plot.offsetTop);
    }

    visible({ point }) {
      const [x, y] = [this.x(point.x), this.y(point.y)];
      return x >= this.box.left - 6 && x <= this.box.right + 6 && y >= this.box.top - 6 && y <= this.box.bottom + this.lane + 6;
    }

    key(event) {
      const pan = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] }[event.key];
      if (pan && event.shiftKey) this.pan(...pan);
      else if (pan) this.walk(pan[0] || -pan[1]);
      else if (event.key === "+" || event.key === "=") this.zoom(0.6);
      else if (event.key === "-") this.zoom(1 / 0.6);
      else if (event.key === "0") this.reset();
      else if (event.key === "Enter" && this.current >= 0) open(this.points[this.current].point.detail);
      else return;
      event.preventDefault();
    }

    walk(step) {
      const order = this.points.map((_, index) => index).filter((index) => this.visible(this.points[index]))
        .sort((a, b) => this.points[a].point.x - this.points[b].point.x || a - b);
      if (!order.length) return;
      const place = order.indexOf(this.current);
      this.current = order[place < 0 ? (step > 0 ? 0 : order.length - 1) : Math.max(0, Math.min(order.length - 1, place + step))];
      this.tell();
    }

    zoom(factor) {
      const found = this.points[this.current];
      const { x0, x1, y0, y1 } = this.view;
      const cx = found ? found.point.x : (x0 + x1) / 2;
      const cy = found && found.point.y !== null ? this.scale(found.point.y) : (y0 + y1) / 2;
      this.view = { x0: cx - (cx - x0) * factor, x1: cx + (x1 - cx) * factor, y0: cy - (cy - y0) * factor, y1: cy + (y1 - cy) * factor };
      this.bounded();
    }

    pan(across, up) {
      const { x0, x1, y0, y1 } = this.view;
      const [dx, dy] = [across * (x1 - x0) / 5, up * (y1 - y0) / 5];
      this.view = { x0: x0 + dx, x1: x1 + dx, y0: y0 + dy, y1: y1 + dy };
      this.bounded();
    }

    bounded() {
      for (const [a, b] of [["x0", "x1"], ["y0", "y1"]]) {
        const size = Math.min(this.view[b] - this.view[a], this.whole[b] - this.whole[a]);
        this.view[a] = Math.min(Math.max(this.view[a], this.whole[a]), this.whole[b] - size);
        this.view[b] = this.view[a] + size;
      }
      this.tip.hide();
      this.draw();
    }

    reset() { this.view = { ...this.whole }; this.bounded(); }

    place(event) {
      const box = this.root.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    }

    nearest([x, y]) {
      let best = -1, distance = 22;
      this.points.forEach((item, index) => {
        if (!this.visible(item)) return;
        const away = Math.hypot(this.x(item.point.x) - x, this.y(item.point.y) - y);
        if (away < distance) [best, distance] = [index, away];
      });
      return best;
    }

    press(event) {
      if (event.button !== 0) return;
      this.drag = this.place(event);
      if (event.pointerType === "mouse") this.plot.setPointerCapture(event.pointerId);
    }

    move(event) {
      const now = this.place(event);
      if (this.drag && event.pointerType === "mouse" && Math.hypot(now[0] - this.drag[0], now[1] - this.drag[1]) > 6) {
        const [[a, b], [c, d]] = [this.drag, now];
        this.overlay.replaceChildren();
        svg("rect", { x: Math.min(a, c), y: Math.min(b, d), width: Math.abs(a - c), height: Math.abs(b - d), class: "box" }, this.overlay);
        return;
      }
      const found = this.nearest(now);
      if (found === this.current) return;
      this.current = found;
      this.plot.classList.toggle("hot", found >= 0);
      if (found >= 0) this.tell();
      else { this.tip.hide(); this.ring(); }
    }

    release(event) {
      const [from, to] = [this.drag, this.place(event)];
      this.drag = null;
      if (!from) return;
      const dragged = event.pointerType === "mouse" && Math.abs(from[0] - to[0]) > 12 && Math.abs(from[1] - to[1]) > 12;
      if (dragged) {
        const { x0, x1, y0, y1 } = this.view, box = this.box;
        const across = (px) => x0 + (px - box.left) / (box.right - box.left) * (x1 - x0);
        const up = (py) => y0 + (box.bottom - py) / (box.bottom - box.top) * (y1 - y0);
        const [xs, ys] = [[across(from[0]), across(to[0])], [up(from[1]), up(to[1])]];
        this.view = { x0: Math.min(...xs), x1: Math.max(...xs), y0: Math.min(...ys), y1: Math.max(...ys) };
        this.bounded();
        return;
      }
      this.current = this.nearest(to);
      if (this.current >= 0) { this.tell(); open(this.points[this.current].point.detail); }
      else this.ring();
    }
  }

  /* ---- begin ---------------------------------------------------------------------------------------------------- */
  for (const host of document.querySelectorAll(".chart[data-figure]")) {
    const figure = figures.get(host.dataset.figure);
    let width = 0;
    const curves = () => {
      if (host.clientWidth === width || !host.clientWidth) return;
      width = host.clientWidth;
      if (figure.kind === "bars") bars(host, figure);
      else if (host.curves) host.curves.draw();
      else host.curves = new Curves(host, figure);
    };
    curves();
    new ResizeObserver(() => requestAnimationFrame(curves)).observe(host);
  }
})();
