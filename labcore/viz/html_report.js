// One slider for all pictures. Each picture has frames for some steps; it shows the latest one that isn't ahead of the slider.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const slider = document.getElementById("step");
const output = document.getElementById("at");
const play = document.getElementById("play");
const steps = data.steps;
const still = { mode: "immediate", frame: { duration: 0, redraw: true }, transition: { duration: 0 } };
const config = { displaylogo: false, responsive: true, modeBarButtonsToRemove: ["select2d", "lasso2d"] };
const ready = data.pictures.map(({ id, figure }) => {
  const div = document.getElementById(id);
  return Plotly.newPlot(div, figure.data, figure.layout, config).then(async () => {
    await Plotly.addFrames(div, figure.frames);
    div.on("plotly_click", ({ points }) => jump(id, points[0]));
    return { div, frames: figure.frames.map((frame) => Number(frame.name)), shown: null };
  });
});

function latest(sorted, step) {
  let low = 0;
  for (let high = sorted.length; high - low > 1; ) {
    const middle = (low + high) >> 1;
    if (sorted[middle] <= step) low = middle;
    else high = middle;
  }
  return sorted[low];
}

function show(index) {
  const step = steps[Math.min(Math.max(index, 0), steps.length - 1)];
  slider.value = steps.indexOf(step);
  output.textContent = `step ${step}`;
  document.getElementById("words").textContent = data.words[latest(data.worded, step)] ?? "";
  document.getElementById("events").textContent = (data.events[step] ?? ["nothing"]).join("\n");
  return Promise.all(
    ready.map(async (promise) => {
      const picture = await promise;
      const frame = picture.frames.length ? latest(picture.frames, step) : null;
      if (frame === null || frame === picture.shown) return;
      picture.shown = frame;
      await Plotly.animate(picture.div, [String(frame)], still).catch(() => {}); // a later click may overtake it
    })
  ).then(() => document.body.setAttribute("data-step", step));
}

// In the pictures over time a click goes to the step under the mouse.
function jump(id, point) {
  if (!["timeline", "memory", "queues"].includes(id)) return;
  const step = Math.floor(id === "timeline" && point.base !== undefined ? Number(point.base) : Number(point.x));
  if (steps.includes(step)) show(steps.indexOf(step));
}

let timer = null;
function toggle() {
  if (timer) timer = clearInterval(timer);
  else timer = setInterval(() => (Number(slider.value) + 1 < steps.length ? show(Number(slider.value) + 1) : toggle()), 350);
  play.textContent = timer ? "❚❚" : "▶";
  play.setAttribute("aria-label", timer ? "pause" : "play");
}

slider.addEventListener("input", () => show(Number(slider.value)));
document.getElementById("back").addEventListener("click", () => show(Number(slider.value) - 1));
document.getElementById("on").addEventListener("click", () => show(Number(slider.value) + 1));
play.addEventListener("click", toggle);
show(steps.length - 1).then(() => document.body.setAttribute("data-ready", "yes"));
