// A model's text as nodes. Nothing of it is ever parsed as HTML: every word ends in a text node, and a link is one only
// when it goes to http or https.

const INLINE = /(`+)([^`]+?)\1|\*\*([^*]+)\*\*|__([^_]+)__|\*([^*\s][^*]*)\*|\[([^\]]+)\]\(([^()\s]+)\)/;

export function render(text) {
  const out = document.createDocumentFragment();
  const lines = text.split("\n");
  for (let at = 0; at < lines.length; ) {
    const fence = lines[at].match(/^\s*(```+|~~~+)/);
    if (fence) {
      const code = [];
      for (at++; at < lines.length && !lines[at].trim().startsWith(fence[1]); at++) code.push(lines[at]);
      at++;
      const pre = out.appendChild(document.createElement("pre"));
      pre.tabIndex = 0;
      pre.appendChild(document.createElement("code")).textContent = code.join("\n");
      continue;
    }
    const item = /^\s*(?:[-*+]|\d+[.)])\s+/;
    if (item.test(lines[at])) {
      const list = out.appendChild(document.createElement(/^\s*\d/.test(lines[at]) ? "ol" : "ul"));
      for (; at < lines.length && item.test(lines[at]); at++) {
        inline(list.appendChild(document.createElement("li")), lines[at].replace(item, ""));
      }
      continue;
    }
    if (!lines[at].trim()) {
      at++;
      continue;
    }
    const said = [];
    for (; at < lines.length && lines[at].trim() && !item.test(lines[at]) && !/^\s*(```|~~~)/.test(lines[at]); at++) {
      said.push(lines[at]);
    }
    const heading = said.length === 1 && said[0].match(/^#{1,6}\s+(.*)/);
    const paragraph = out.appendChild(document.createElement("p"));
    if (heading) inline(paragraph.appendChild(document.createElement("strong")), heading[1]);
    else {
      said.forEach((line, index) => {
        if (index) paragraph.appendChild(document.createElement("br"));
        inline(paragraph, line);
      });
    }
  }
  return out;
}

function inline(parent, text) {
  let rest = text;
  for (let found; (found = rest.match(INLINE)); rest = rest.slice(found.index + found[0].length)) {
    parent.append(rest.slice(0, found.index));
    const [whole, , code, bold, bolder, slanted, label, address] = found;
    if (code) parent.appendChild(document.createElement("code")).textContent = code;
    else if (bold ?? bolder) inline(parent.appendChild(document.createElement("strong")), bold ?? bolder);
    else if (slanted) inline(parent.appendChild(document.createElement("em")), slanted);
    else if (/^https?:\/\//i.test(address)) {
      const link = parent.appendChild(document.createElement("a"));
      link.href = address;
      link.rel = "noopener noreferrer nofollow";
      link.target = "_blank";
      link.textContent = label;
    } else parent.append(whole);
  }
  parent.append(rest);
}
