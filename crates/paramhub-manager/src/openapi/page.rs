//! docs/control-plane.md, which is made of the OpenAPI document.

use std::collections::HashMap;
use std::fmt::Write;

use serde_json::{Map, Value};

use super::*;

const PAGE: &str = include_str!("../../../../docs/control-plane.md");
/// The variable that makes the test write the page instead of comparing it.
const RENEW: &str = "RENEW_PAGES";
/// An answer that more routes than this give with the same meaning is described once for all of them.
const COMMON_ANSWERS_FROM: usize = 6;

#[test]
fn the_page_of_the_control_plane_shows_the_document() {
    let made = Page::of(&serde_json::to_value(ApiDocument::openapi()).unwrap());
    if std::env::var_os(RENEW).is_some() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/control-plane.md");
        return std::fs::write(path, made).unwrap();
    }
    let differs = made.lines().zip(PAGE.lines()).find(|(made, shown)| made != shown);
    assert!(
        made == PAGE,
        "docs/control-plane.md shows otherwise ({differs:?}): run `{RENEW}=1 cargo nextest run --workspace -E \
         'test(page_of_the_control_plane)'` to renew the page"
    );
}

const HEAD: &str = "# Control plane

<!-- Made of the manager's OpenAPI document; crates/paramhub-manager/src/openapi/page.rs says how to renew it. -->

This page lists every route and every type of the connection manager's HTTP interface, as `GET /openapi.json` does.
";
const CALLERS: &str = "
A worker's proof is a keyed hash under the job's nonce: see [protocol.md](protocol.md#who-may-call).

| caller | shows |
| --- | --- |
| operator | `authorization: Bearer TOKEN` with the admin token or another one, if the manager has an admin token. One of the role `admin` is good for every call, one of `hub` for a hub's registration, one of `reader` for reading jobs, hubs, links and metrics |
| hub | `authorization: Bearer TOKEN` with the token that registration answered |
| worker | a proof in the body |
";
const TYPES: &str = "
## Types

A field without a default must be in a request. It is always in an answer.
";

struct Page<'a> {
    schemas: &'a Map<String, Value>,
    /// Answers that many routes give with the same meaning.
    common: Vec<(&'a str, &'a str)>,
    text: String,
}

impl<'a> Page<'a> {
    fn of(document: &'a Value) -> String {
        let schemas = document["components"]["schemas"].as_object().unwrap();
        let paths = document["paths"].as_object().unwrap();
        let mut page = Page { schemas, common: common_answers(paths), text: HEAD.to_owned() };
        page.add(format!("\n{}\n{CALLERS}", description_text(&document["info"]["description"], "\n\n")));
        page.add("\nMany routes give these answers. The others are listed with their routes.\n\n");
        page.add("| status | meaning |\n| --- | --- |\n");
        for (status, meaning) in page.common.clone() {
            page.add(format!("| {status} | {meaning} |\n"));
        }
        for tag in document["tags"].as_array().unwrap() {
            let name = tag["name"].as_str().unwrap();
            page.add(format!("\n## Routes: {name}\n\n{}\n", description_text(&tag["description"], "\n\n")));
            for (path, methods) in paths {
                let methods = methods.as_object().unwrap();
                if methods.values().any(|operation| operation["tags"][0] == name) {
                    page.add(format!("\n### `{path}`\n"));
                    methods.iter().for_each(|(method, operation)| page.operation(method, operation));
                }
            }
        }
        page.add(TYPES);
        let (sections, rows): (Vec<&String>, Vec<&String>) =
            schemas.keys().filter(|name| *name != "u16").partition(|name| page.has_section(name));
        sections.into_iter().for_each(|name| page.section(name));
        page.add("\n### Values\n\n| type | values | meaning |\n| --- | --- | --- |\n");
        for name in rows {
            let schema = &schemas[name];
            let values =
                schema["enum"].as_array().map_or_else(|| page.shape(schema), |values| listed(values));
            page.row(name, &[&values, &description_text(&schema["description"], " ")]);
        }
        page.text
    }

    fn add(&mut self, text: impl AsRef<str>) {
        self.text += text.as_ref();
    }

    fn row(&mut self, what: impl AsRef<str>, cells: &[&str]) {
        write!(self.text, "| {} |", what.as_ref()).unwrap();
        cells.iter().for_each(|cell| {
            write!(self.text, " {cell}{}|", if cell.is_empty() { "" } else { " " }).unwrap()
        });
        self.add("\n");
    }

    fn operation(&mut self, method: &str, operation: &Value) {
        let description = format!("{}\n\n{}", operation["summary"].as_str().unwrap(), described(operation));
        let body = &operation["requestBody"]["content"]["application/json"]["schema"];
        let (method, caller) = (method.to_uppercase(), self.caller(operation, body));
        self.add(format!(
            "\n**{method}**, {caller}. {}\n\n| | |\n| --- | --- |\n",
            description_text(&description.into(), "\n\n")
        ));
        for parameter in operation["parameters"].as_array().into_iter().flatten() {
            let place = match parameter["in"].as_str() {
                Some("path") => "in the path",
                Some("header") => "in a header",
                _ => "in the query",
            };
            let optional = if parameter["required"] == true { "" } else { ", may be left out" };
            let (name, what) = (parameter["name"].as_str().unwrap(), self.shape(&parameter["schema"]));
            let meaning = format!("{what}: {}", description_text(&parameter["description"], " "));
            self.row(format!("`{name}` {place}{optional}"), &[&meaning]);
        }
        if !body.is_null() {
            self.row("body", &[&self.shape(body)]);
        }
        let mut common = Vec::new();
        for (status, response) in operation["responses"].as_object().unwrap() {
            if self.common.contains(&(status, described(response))) {
                common.push(status.as_str());
                continue;
            }
            let content = response["content"].as_object().and_then(|content| content.values().next());
            let content = content.filter(|_| status.starts_with('2'));
            let content = content.map_or(String::new(), |content| self.shape(&content["schema"]) + ": ");
            self.row(status, &[&(content + &description_text(&response["description"], " "))]);
        }
        if !common.is_empty() {
            self.row("also", &[&common.join(", ")]);
        }
    }

    /// The callers of a route. The document has no scheme for the proofs of workers, which are in the body.
    fn caller(&self, operation: &Value, body: &Value) -> &'static str {
        let schemes = operation["security"].as_array().map_or(&[][..], Vec::as_slice);
        let needs =
            |token: &str| !schemes.is_empty() && schemes.iter().all(|scheme| !scheme[token].is_null());
        let has_proof =
            name_of(body).is_some_and(|name| !self.schemas[name]["properties"]["proof"].is_null());
        match (needs("admin_token"), needs("hub_token"), has_proof) {
            (true, _, _) => "operator",
            (_, true, _) => "hub",
            (_, _, true) => "worker",
            _ => "anyone",
        }
    }

    /// Returns whether a type needs more than a row.
    fn has_section(&self, name: &str) -> bool {
        let schema = &self.schemas[name];
        schema["properties"].is_object()
            || schema["oneOf"].is_array()
            || schema["allOf"].is_array()
            || (schema["enum"].is_array() && described(schema).contains("\n\n"))
    }

    fn section(&mut self, name: &str) {
        let schema = &self.schemas[name];
        self.add(format!("\n### {name}\n"));
        if !described(schema).is_empty() {
            self.add(format!("\n{}\n", description_text(&schema["description"], "\n\n")));
        }
        if let Some(variants) = schema["oneOf"].as_array() {
            self.add("\n| value | type | meaning |\n| --- | --- | --- |\n");
            variants.iter().for_each(|variant| self.variant(variant));
        } else if let Some(parts) = schema["allOf"].as_array() {
            let others: Vec<String> = parts.iter().filter_map(name_of).map(|name| self.link(name)).collect();
            self.add(format!("\nBesides the fields of {}:\n", others.join(" and ")));
            parts.iter().filter(|part| part["properties"].is_object()).for_each(|part| self.fields(part));
        } else if schema["properties"].is_object() {
            self.fields(schema);
        }
    }

    fn fields(&mut self, schema: &Value) {
        self.add("\n| field | type | default | meaning |\n| --- | --- | --- | --- |\n");
        for (field, property) in fields(schema) {
            let default = match (&property["default"], is_required(schema, field)) {
                (_, true) => String::new(),
                (Value::Null, false) => "may be left out".to_owned(),
                (default, false) => format!("`{default}`"),
            };
            self.row(format!("`{field}`"), &[&self.shape(property), &default, &meaning(property)]);
        }
    }

    /// A variant of an enum as serde writes it: a text, an object with one field, or an object with a tag.
    fn variant(&mut self, variant: &Value) {
        let description = description_text(&variant["description"], " ");
        if let Some(value) = variant["enum"][0].as_str() {
            return self.row(format!("`\"{value}\"`"), &["", &description]);
        }
        let properties = variant["properties"].as_object().unwrap();
        let tag = properties.iter().find_map(|(name, property)| Some((name, property["enum"][0].as_str()?)));
        let (name, content) = match tag {
            Some((_, value)) => (value, variant),
            None => properties.iter().next().map(|(name, content)| (name.as_str(), content)).unwrap(),
        };
        if content["properties"].is_null() {
            return self.row(format!("`{name}`"), &[&self.shape(content), &description]);
        }
        let value = tag.map_or(format!("`{name}`"), |(tag, value)| format!("`{tag}`: `\"{value}\"`"));
        self.row(value, &["object", &description]);
        for (field, property) in fields(content).filter(|(_, property)| property["enum"].is_null()) {
            let optional = if is_required(content, field) { "" } else { ", may be left out" };
            self.row(format!("`{name}.{field}`"), &[&(self.shape(property) + optional), &meaning(property)]);
        }
    }

    fn link(&self, name: &str) -> String {
        match (name, self.has_section(name)) {
            ("u16", _) => "integer".to_owned(),
            (_, true) => format!("[{name}](#{})", name.to_lowercase()),
            (_, false) => format!("[{name}](#values)"),
        }
    }

    /// The type of a schema, in a few words.
    fn shape(&self, schema: &Value) -> String {
        if let Some(name) = name_of(schema) {
            return self.link(name);
        }
        if let Some(choices) = schema["oneOf"].as_array() {
            let names = choices.iter().map(|choice| self.shape(choice)).filter(|name| name != "null");
            return names.collect::<Vec<_>>().join(" or ");
        }
        let kind = match &schema["type"] {
            Value::Array(kinds) => kinds.iter().find(|kind| *kind != "null").unwrap(),
            kind => kind,
        };
        match kind.as_str().unwrap_or("any") {
            "array" => format!("list of {}", self.shape(&schema["items"])),
            "object" if schema["additionalProperties"].is_object() => {
                format!("object of {}", self.shape(&schema["additionalProperties"]))
            }
            kind => kind.to_owned(),
        }
    }
}

fn common_answers(paths: &Map<String, Value>) -> Vec<(&str, &str)> {
    let operations = paths.values().flat_map(|methods| methods.as_object().unwrap().values());
    let mut counts: HashMap<(&str, &str), usize> = HashMap::new();
    for (status, response) in operations.flat_map(|operation| operation["responses"].as_object().unwrap()) {
        *counts.entry((status, described(response))).or_default() += 1;
    }
    let common = counts.into_iter().filter(|(_, count)| *count >= COMMON_ANSWERS_FROM);
    let mut common: Vec<_> = common.map(|(answer, _)| answer).collect();
    common.sort_unstable();
    common
}

/// The fields of an object: those that it must have, in their order, then the others by name.
fn fields(schema: &Value) -> impl Iterator<Item = (&str, &Value)> {
    let properties = &schema["properties"];
    let required = schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str);
    let others = properties.as_object().unwrap().keys().map(String::as_str);
    let others = others.filter(|field| !is_required(schema, field));
    required.chain(others).map(|field| (field, &properties[field]))
}

fn is_required(schema: &Value, field: &str) -> bool {
    schema["required"].as_array().is_some_and(|required| required.iter().any(|name| name == field))
}

fn name_of(schema: &Value) -> Option<&str> {
    schema["$ref"].as_str()?.strip_prefix("#/components/schemas/")
}

fn listed(values: &[Value]) -> String {
    values.iter().map(|value| format!("`{}`", value.as_str().unwrap())).collect::<Vec<_>>().join(", ")
}

/// The description of a field. Where the field's type has a name, it stands beside that name.
fn meaning(property: &Value) -> String {
    let choices = || property["oneOf"].as_array().into_iter().flatten();
    let description =
        std::iter::once(property).chain(choices()).map(described).find(|description| !description.is_empty());
    description_text(&description.unwrap_or_default().into(), " ")
}

fn described(schema: &Value) -> &str {
    schema["description"].as_str().unwrap_or_default()
}

/// A doc comment as text of the page: a paragraph or an item of a list to a line, without links into the
/// sources.
fn description_text(description: &Value, between: &str) -> String {
    let one_line = |lines: &str| lines.split_whitespace().collect::<Vec<_>>().join(" ");
    let paragraphs = description.as_str().unwrap_or_default().trim().split("\n\n");
    let paragraphs =
        paragraphs.map(|items| items.split("\n- ").map(one_line).collect::<Vec<_>>().join("\n- "));
    let paragraphs = paragraphs.collect::<Vec<_>>().join(between);
    without_links(&paragraphs).replace("`None`", "`null`").replace('|', "\\|")
}

/// `` [`path::Item`] `` becomes `` `item` ``, and `[text](path::item)` becomes its text.
fn without_links(text: &str) -> String {
    let (mut plain, mut rest) = (String::new(), text);
    while let Some((before, after)) = rest.split_once('[') {
        let Some((inner, behind)) = after.split_once(']') else { break };
        plain += before;
        let target = behind.strip_prefix('(').and_then(|behind| behind.split_once(')'));
        let target = target.filter(|(target, _)| target.contains("::"));
        match (target, inner.rsplit_once("::")) {
            (None, _) if !inner.starts_with('`') => write!(plain, "[{inner}]").unwrap(),
            (_, Some((_, item))) => write!(plain, "`{}", item.to_lowercase()).unwrap(),
            (_, None) => plain += inner,
        }
        rest = target.map_or(behind, |(_, behind)| behind);
    }
    plain + rest
}
