//! Chat templates against what `transformers` renders, and what must be refused.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

use common::json;
use minfer_text::{ChatTemplate, Error, Message, RenderOptions};
use serde_json::Value;

fn render(template: &ChatTemplate, case: &Value, now: u64) -> Result<String, Error> {
    let messages: Vec<Message> = serde_json::from_value(case["messages"].clone()).unwrap();
    let opts = RenderOptions {
        add_generation_prompt: case["add_generation_prompt"].as_bool().unwrap(),
        tools: Some(case["tools"].clone()).filter(|tools| !tools.is_null()),
        extra: case["extra"].as_object().unwrap().clone(),
        now: Some(UNIX_EPOCH + Duration::from_secs(now)),
    };
    template.render(&messages, &opts)
}

/// Reference: `transformers`, which also fails where we fail.
#[test]
fn prompts_equal_transformers() {
    let data = json("prompts.json");
    let now = data["now"].as_u64().unwrap();
    let (bos, eos) = (data["bos"].as_str().unwrap(), data["eos"].as_str().unwrap());
    for (name, template) in data["templates"].as_object().unwrap() {
        let parsed = ChatTemplate::new(template["source"].as_str().unwrap(), bos, eos).unwrap();
        for case in template["cases"].as_array().unwrap() {
            match (render(&parsed, case, now), case["text"].as_str()) {
                (Ok(text), Some(expected)) => assert_eq!(text, expected, "{name}: {}", case["name"]),
                (Err(_), None) => {}
                (got, expected) => panic!("{name}: {}: {got:?} instead of {expected:?}", case["name"]),
            }
        }
    }
}

fn fails(source: &str) -> Error {
    let messages = [Message::new("user", "hi")];
    match ChatTemplate::new(source, "", "") {
        Ok(template) => template.render(&messages, &RenderOptions::default()).unwrap_err(),
        Err(error) => error,
    }
}

#[test]
fn refusals_name_the_construct_and_the_line() {
    for (source, expected) in [
        (
            "a\n{% if x %}",
            "the chat template cannot be parsed at line 2: unexpected end of input, expected end of block",
        ),
        (
            "a\n\n{{ messages | frobnicate }}",
            "the chat template uses something unknown at line 3: filter frobnicate is unknown",
        ),
        ("{{ frobnicate(1) }}", "the chat template uses something unknown at line 1: frobnicate is unknown"),
        (
            "{{ 1 is frobnicated }}",
            "the chat template uses something unknown at line 1: test frobnicated is unknown",
        ),
        (
            "\n{{ 'a'.frobnicate() }}",
            "the chat template uses something unknown at line 2: string has no method named frobnicate",
        ),
        (
            "{% include 'x' %}",
            "the chat template uses something unknown at line 1: tried to include non-existing template 'x'",
        ),
        (
            "{{ raise_exception('no system role: ' + messages[0].role) }}",
            "the chat template refused the conversation: no system role: user",
        ),
    ] {
        assert_eq!(fails(source).to_string(), expected, "{source}");
    }
}

#[test]
fn a_raised_message_comes_through_blocks_and_macros() {
    let source =
        "{% macro m() %}{{ raise_exception('inner') }}{% endmacro %}{% set x %}{{ m() }}{% endset %}{{ x }}";
    assert!(matches!(fails(source), Error::TemplateRaised { message } if message == "inner"));
}

#[test]
fn limits_stop_hostile_templates() {
    for source in [
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{% for i in range(100000) %}{% for j in range(100000) %}xxxxxxxxxxxxxxxx{% endfor %}{% endfor %}",
        "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% for i in range(100000) %}{{ 'x' * 1000 }}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    ] {
        let started = std::time::Instant::now();
        let error = fails(source);
        println!("{:?} {source:.60}", started.elapsed());
        assert!(matches!(error, Error::TemplateLimit { .. }), "{source}: {error:?}");
    }
    // Deep values and deep sources are refused as well, whatever the engine calls it.
    for source in [
        "{% set ns = namespace(x=[]) %}{% for i in range(100000) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x }}".to_owned(),
        "{% set ns = namespace(x=[]) %}{% for j in range(99) %}{% for i in range(100000) %}{% set ns.x = [ns.x] %}{% endfor %}{% endfor %}".to_owned(),
        "{% set ns = namespace(x=[]) %}{% for i in range(100000) %}{% set ns.x = {'a': ns.x} %}{% endfor %}{{ ns.x | tojson }}".to_owned(),
        format!("{{{{ {}1{} }}}}", "(".repeat(4000), ")".repeat(4000)),
        format!("{{{{ {}1 }}}}", "not ".repeat(2000)),
        format!("{{{{ {}1 }}}}", "-".repeat(8000)),
        format!("{{{{ a{} }}}}", ".a".repeat(4000)),
        format!("{{{{ {}1{} }}}}", "[".repeat(4000), "]".repeat(4000)),
        format!("{{{{ 1{} }}}}", "~1".repeat(4000)),
        format!("{{{{ 1{} }}}}", "**1".repeat(2000)),
        format!("{{{{ 1{} }}}}", " if 1 else 1".repeat(600)),
        "x".repeat(140_000),
        "{{ 1 }}{% if 1 %}".repeat(6000),
        format!("{}{}", "{% if 1 %}".repeat(6000), "{% endif %}".repeat(6000)),
    ] {
        let started = std::time::Instant::now();
        // The expression, not the limit of the source, is what is tested; some of these are even fine.
        let _ = ChatTemplate::new(&source, "", "").and_then(|t| t.render(&[], &RenderOptions::default()));
        println!("{:?} {source:.60}", started.elapsed());
    }
}

#[test]
fn long_conversations_render() {
    let nano = json("prompts.json")["templates"]["nano"]["source"].as_str().unwrap().to_owned();
    let template = ChatTemplate::new(&nano, "", "").unwrap();
    let text = "word ".repeat(2000);
    let messages: Vec<Message> =
        (0..400).map(|i| Message::new(["user", "assistant"][i % 2], text.as_str())).collect();
    let prompt = template.render(&messages, &RenderOptions::default()).unwrap();
    assert!(prompt.len() > 4_000_000, "400 messages of 10 kB fit into the limits");
}

/// Reference: `DIR/templates/expected.json`, which `make_fixtures.py templates` writes.
#[test]
#[ignore = "needs MINFER_VOCAB_DIR, made by scripts/fetch-tokenizer-vectors.sh"]
fn llama_cpp_templates() {
    let dir = std::env::var_os("MINFER_VOCAB_DIR").expect("MINFER_VOCAB_DIR");
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(dir).join("templates");
    let expected: Option<Value> =
        std::fs::read(dir.join("expected.json")).ok().map(|bytes| serde_json::from_slice(&bytes).unwrap());
    let mut paths: Vec<PathBuf> =
        std::fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.retain(|path| path.extension().is_some_and(|e| e == "jinja"));
    paths.sort();
    assert!(!paths.is_empty(), "no templates in {}", dir.display());
    let conversations = json("prompts.json")["templates"]["nano"]["cases"].clone();
    let now = json("prompts.json")["now"].as_u64().unwrap();
    let (mut same, mut unlike, mut unparsed) = (0, 0, 0);
    for path in paths {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let template = match ChatTemplate::new(&std::fs::read_to_string(&path).unwrap(), "<bos>", "<eos>") {
            Ok(template) => template,
            Err(error) => {
                unparsed += 1;
                println!("{name}: {error}");
                continue;
            }
        };
        // `Markup` of jinja2 escapes what is added to it; there is no HTML here.
        if name == "meetkai-functionary-medium-v3.1.jinja" {
            continue;
        }
        let cases = expected.as_ref().map_or(&conversations, |all| &all[&name]);
        for case in cases.as_array().unwrap() {
            let got = render(&template, case, now);
            let agrees = match (&got, case["text"].as_str()) {
                _ if expected.is_none() => got.is_ok(),
                (Ok(text), Some(reference)) => text == reference,
                (Ok(_), None) => lenient(&case["error"]),
                (Err(_), reference) => reference.is_none(),
            };
            same += usize::from(agrees);
            if !agrees {
                unlike += 1;
                println!("{name}: {}: {}", case["name"], difference(&got, case));
            }
        }
    }
    println!("{same} prompts as expected, {unlike} not; {unparsed} templates cannot be parsed");
    assert_eq!(unparsed, 0);
    // Without the references some conversations are rightly refused by their template.
    assert!(expected.is_none() || unlike == 0);
}

/// What Python refuses and we render: a loop over `none` runs no times, and lazy lists can be dumped.
fn lenient(error: &Value) -> bool {
    let known =
        ["'NoneType' object is not iterable", "type 'NoneType' is not iterable", "generator is not JSON"];
    error.as_str().is_some_and(|error| known.iter().any(|text| error.contains(text)))
}

fn difference(got: &Result<String, Error>, case: &Value) -> String {
    match (got, case["text"].as_str()) {
        (Ok(text), Some(reference)) => {
            let at = text.bytes().zip(reference.bytes()).take_while(|(a, b)| a == b).count();
            let near = |s: &str| {
                String::from_utf8_lossy(&s.as_bytes()[at.saturating_sub(20)..(at + 40).min(s.len())])
                    .into_owned()
            };
            format!("{:?} instead of {:?}", near(text), near(reference))
        }
        (Ok(_), None) => format!("renders, the reference fails: {}", case["error"]),
        (Err(error), _) => error.to_string(),
    }
}
