// What the page does beyond links and forms: it refreshes itself, shows the values below the
// pointer, and zooms into what is dragged over. It sends nothing but the page's own address.
"use strict";

const every = 2000;
let held = false; // something is under the pointer
let busy = false; // an answer is awaited

// refresh replaces the content by that of a new answer, and keeps what has the focus.
async function refresh() {
	const main = document.getElementById("main");
	if (main.dataset.live !== "true" || document.hidden || busy || held || document.activeElement.tagName === "INPUT") return;
	busy = true;
	try {
		const answer = await fetch(location.href);
		if (!answer.ok) throw new Error(answer.statusText);
		const page = new DOMParser().parseFromString(await answer.text(), "text/html");
		if (held || document.activeElement.tagName === "INPUT") return;
		const open = [...main.querySelectorAll("details")].map((d) => d.open);
		const scrolled = [...main.querySelectorAll(".scroll")].map((d) => d.scrollLeft);
		const focusable = "a, button, input, summary, [tabindex]";
		const focus = [...main.querySelectorAll(focusable)].indexOf(document.activeElement);
		const link = focus >= 0 ? document.activeElement.getAttribute("href") : null;
		main.replaceChildren(...page.getElementById("main").childNodes);
		const state = document.getElementById("state"), next = page.getElementById("state");
		state.className = next.className;
		state.textContent = next.textContent;
		main.querySelectorAll("details").forEach((d, i) => { d.open = open[i] === true; });
		main.querySelectorAll(".scroll").forEach((d, i) => { d.scrollLeft = scrolled[i] || 0; });
		if (focus >= 0) {
			const all = [...main.querySelectorAll(focusable)];
			const same = link === null ? all[focus] : all.find((e) => e.getAttribute("href") === link);
			if (same) same.focus({preventScroll: true});
		}
		plots(main);
	} catch (problem) {
		const state = document.getElementById("state");
		state.className = "state";
		state.textContent = "fairlead web does not answer";
	} finally {
		busy = false;
	}
}

// plots makes the diagrams below an element answer to the pointer and to keys.
function plots(root) {
	for (const area of root.querySelectorAll(".area")) {
		const data = JSON.parse(area.dataset.plot);
		const parts = data.texts && data.texts.length ? data.texts[0].length : 0;
		let cursor, tip, chosen, from;
		const at = (x) => Math.min(Math.max(x / area.clientWidth, 0), 1);
		const clear = () => { for (const e of [cursor, tip, chosen]) if (e) e.remove(); cursor = tip = chosen = undefined; };
		const add = (name) => { const e = document.createElement("div"); e.className = name; area.append(e); return e; };
		const show = (part) => {
			cursor = cursor || add("cursor");
			tip = tip || add("tip");
			cursor.style.left = 100 * part + "%";
			const line = (text, ink) => {
				const e = document.createElement("div");
				if (ink) e.append(Object.assign(document.createElement("i"), {className: "ink-" + ink}));
				e.append(text);
				return e;
			};
			const n = Math.min(Math.round(part * (parts - 1)), parts - 1);
			const when = new Date(data.from + part * (data.to - data.from));
			tip.replaceChildren(line(when.toLocaleString()), ...(data.names || []).map((name, i) => line(name + " " + (data.texts[i][n] || "–"), data.inks[i])));
			tip.style.left = part < 0.5 ? "calc(" + 100 * part + "% + .5rem)" : "";
			tip.style.right = part < 0.5 ? "" : "calc(" + 100 * (1 - part) + "% + .5rem)";
		};
		area.addEventListener("pointermove", (e) => {
			held = true;
			const part = at(e.clientX - area.getBoundingClientRect().left);
			show(part);
			if (from !== undefined) {
				chosen = chosen || add("chosen");
				chosen.style.left = 100 * Math.min(from, part) + "%";
				chosen.style.width = 100 * Math.abs(from - part) + "%";
			}
		});
		area.addEventListener("pointerdown", (e) => { if (e.pointerType === "mouse" && e.button === 0) from = at(e.clientX - area.getBoundingClientRect().left); });
		area.addEventListener("pointerup", (e) => {
			const to = at(e.clientX - area.getBoundingClientRect().left);
			if (from !== undefined && Math.abs(from - to) > 0.02) {
				const span = data.to - data.from, address = new URL(location.href);
				const end = data.from + Math.max(from, to) * span;
				address.searchParams.set("span", Math.max(Math.round(Math.abs(from - to) * span / 1000), 20) + "s");
				address.searchParams.set("to", new Date(end).toISOString().slice(0, 19) + "Z");
				location.href = address;
			}
			from = undefined;
		});
		area.addEventListener("pointerleave", () => { held = false; from = undefined; clear(); });
		area.addEventListener("blur", clear);
		area.addEventListener("keydown", (e) => {
			const link = document.querySelector('[data-key="' + CSS.escape(e.key) + '"]');
			if (link && !e.ctrlKey && !e.altKey && !e.metaKey) { e.preventDefault(); link.click(); }
		});
	}
}

plots(document);
setInterval(refresh, every);
