"use strict";

const root = document.documentElement;

function remember(name, value) {
  try { localStorage.setItem(name, value); } catch { /* private mode: the choice lasts for this page */ }
}

function recall(name) {
  try { return localStorage.getItem(name); } catch { return null; }
}

if (recall("theme")) root.dataset.theme = recall("theme");
document.getElementById("theme").addEventListener("click", () => {
  const dark = root.dataset.theme
    ? root.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  remember("theme", root.dataset.theme);
});

let firstModel = null;

/** An example with the name of a model that is really there. */
function filled(text) {
  return firstModel === null ? text : text.replaceAll('"my-model"', JSON.stringify(firstModel));
}

function address(form) {
  return form.dataset.path.replace(/\{(\w+)\}/g, (_, name) =>
    encodeURIComponent(form.elements.namedItem(name).value));
}

function quoted(text) {
  return "'" + text.replaceAll("'", "'\\''") + "'";
}

function curl(form) {
  const parts = ["curl", quoted(location.origin + address(form))];
  if (form.elements.body) {
    parts.push("-H 'content-type: application/json'", "-d " + quoted(form.elements.body.value));
  }
  return parts.join(" ");
}

async function send(form) {
  const outcome = form.querySelector(".outcome");
  const output = form.querySelector("pre.output");
  const stop = form.querySelector(".stop");
  const control = new AbortController();
  const started = performance.now();
  const elapsed = () => `${Math.round(performance.now() - started)} ms`;
  const options = { method: form.dataset.method.toUpperCase(), signal: control.signal };
  if (form.elements.body) {
    options.headers = { "content-type": "application/json" };
    options.body = form.elements.body.value;
  }
  output.hidden = false;
  output.textContent = "";
  outcome.textContent = "…";
  stop.disabled = false;
  stop.onclick = () => control.abort();
  try {
    const response = await fetch(address(form), options);
    const id = response.headers.get("x-request-id");
    const head = `${response.status} ${response.statusText}${id ? ` · ${id}` : ""}`;
    outcome.textContent = `${head} · ${elapsed()}`;
    const kind = response.headers.get("content-type") || "";
    if (kind.startsWith("application/json")) {
      output.textContent = JSON.stringify(await response.json(), null, 2);
    } else if (response.body) {
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      for (let part = await reader.read(); !part.done; part = await reader.read()) {
        output.append(part.value);
        output.scrollTop = output.scrollHeight;
      }
    }
    outcome.textContent = `${head} · ${elapsed()}`;
  } catch (error) {
    outcome.textContent = control.signal.aborted ? `stopped · ${elapsed()}` : `failed: ${error.message}`;
  } finally {
    stop.disabled = true;
  }
}

for (const form of document.querySelectorAll("form")) {
  const body = form.elements.body;
  const choice = form.elements.example;
  if (choice) {
    choice.addEventListener("change", () => {
      body.value = filled(choice.selectedOptions[0].dataset.body);
    });
  }
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    send(form);
  });
  form.querySelector(".curl").addEventListener("click", async (event) => {
    const output = form.querySelector("pre.output");
    output.hidden = false;
    output.textContent = curl(form);
    try {
      await navigator.clipboard.writeText(curl(form));
      form.querySelector(".outcome").textContent = "copied";
    } catch { /* no clipboard on plain http: it can be copied from the page */ }
  });
}

fetch("/v1/models").then((response) => response.json()).then((models) => {
  if (!models.data || models.data.length === 0) return;
  firstModel = models.data[0].id;
  for (const body of document.querySelectorAll("textarea[name=body]")) body.value = filled(body.value);
  for (const input of document.querySelectorAll("input[name=model]")) input.value = firstModel;
}).catch(() => { /* the examples keep their placeholder */ });
