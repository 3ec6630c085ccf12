// The OpenAPI document, for people.

const place = document.getElementById("endpoints");

function add(parent, name, text) {
  const out = parent.appendChild(document.createElement(name));
  if (text) out.textContent = text;
  return out;
}

function kind(schema) {
  if (!schema) return "anything";
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.anyOf) return schema.anyOf.map(kind).filter((each) => each !== "null").join(" or ") || "null";
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((each) => JSON.stringify(each)).join(", ");
  if (schema.type === "array") return `list of ${kind(schema.items)}`;
  return schema.type ?? "anything";
}

const document_ = await (await fetch("/openapi.json")).json();
for (const [path, methods] of Object.entries(document_.paths)) {
  for (const [method, operation] of Object.entries(methods)) {
    add(place, "h2", `${method.toUpperCase()} ${path}`);
    add(place, "p", operation.description ?? operation.summary);
    const name = operation.requestBody?.content?.["application/json"]?.schema?.$ref?.split("/").pop();
    const schema = name && document_.components.schemas[name];
    if (!schema?.properties) continue;
    const table = add(place, "table");
    for (const [field, about] of Object.entries(schema.properties)) {
      const row = add(table, "tr");
      add(row, "th", field + (schema.required?.includes(field) ? "" : "?")).scope = "row";
      add(row, "td", kind(about));
    }
  }
}
