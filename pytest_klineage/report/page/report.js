"use strict";
/* Sorting, themes and details of a report. Recorded text only ever becomes text nodes. */
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const details = new Map(data.details.map((item) => [item.key, item]));
  const html = (name, properties = {}, parent = null) => {
    const node = Object.assign(document.createElement(name), properties);
    if (parent) parent.append(node);
    return node;
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
    const link = event.target.closest("[data-detail]");
    if (link) open(link.dataset.detail);
  });
})();
