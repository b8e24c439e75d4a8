// Keeps a page of `sottovoce watch` up to date: the server sends the blocks that changed.
"use strict";
const root = new URL(".", document.currentScript.src).pathname;
const gone = document.getElementById("gone");
let source = null;

function follow() {
  source?.close();
  source = new EventSource(root + "events/" + location.pathname.slice(root.length) + location.search);
  source.onopen = () => { gone.hidden = true; };
  source.onerror = () => say("The server of this page does not answer. It may have been stopped; this page shows the last it said.");
  source.onmessage = event => {
    for (const [id, html] of Object.entries(JSON.parse(event.data))) {
      if (id === "gone") say(html + ".");
      else replace(document.getElementById(id), html);
    }
    document.title = document.querySelector("h1").textContent;
  };
}

function say(text) {
  gone.textContent = text;
  gone.hidden = false;
}

// The server has escaped every value in this markup. What the reader chose or scrolled to stays.
function replace(region, html) {
  const checked = [...region.querySelectorAll("input:checked")].map(box => box.value);
  const scrolled = [...region.querySelectorAll(".scroll")].map(box => box.scrollLeft);
  region.innerHTML = html;
  for (const box of region.querySelectorAll("input")) box.checked = checked.includes(box.value);
  region.querySelectorAll(".scroll").forEach((box, i) => { box.scrollLeft = scrolled[i] ?? 0; });
}

// A form changes the page's address, and the page follows it.
let timer = 0;
function submit(form) {
  clearTimeout(timer);
  timer = setTimeout(() => {
    history.replaceState(null, "", "?" + new URLSearchParams(new FormData(form)));
    follow();
  }, 120);
}

// A slider is the logarithm of its number.
function toSlider(slider, number) {
  const low = Math.log(slider.dataset.low), high = Math.log(slider.dataset.high);
  slider.value = number.value === "" ? 1 : (Math.log(number.value) - low) / (high - low);
}

function toNumber(slider, number) {
  const low = Math.log(slider.dataset.low), high = Math.log(slider.dataset.high);
  const value = Math.exp(low + slider.value * (high - low));
  number.value = "whole" in slider.dataset ? Math.round(value) : Number(value.toPrecision(3));
}

for (const form of document.querySelectorAll("form.live")) {
  for (const slider of form.querySelectorAll("input[type=range]")) {
    const number = form.elements[slider.dataset.for];
    slider.hidden = false;
    toSlider(slider, number);
    slider.addEventListener("input", () => toNumber(slider, number));
    number.addEventListener("input", () => toSlider(slider, number));
  }
  form.addEventListener("input", () => submit(form));
  form.addEventListener("submit", event => { event.preventDefault(); submit(form); });
}

// A browser opens six connections to a server: tabs that nobody looks at leave theirs to others.
document.addEventListener("visibilitychange", () => { document.hidden ? source?.close() : follow(); });
follow();
