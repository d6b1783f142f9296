//! A model's description for people.

use std::fmt::Write;

use super::collect::{Info, MemoryUse, Tokenizer};
use crate::units::{bytes, count};

pub(super) fn print(info: &Info) -> String {
    let mut lines = Lines(String::new());
    let name = info.name.as_ref().map(|n| format!(", \"{n}\"")).unwrap_or_default();
    lines.add("model", &format!("{} ({}{name})", info.source, info.format));
    sizes(&mut lines, info);
    parameters(&mut lines, info);
    for (i, t) in info.tensor_types.iter().enumerate() {
        let label = if i == 0 { "tensors" } else { "" };
        lines.add(label, &format!("{:<7} {:>5}  {:>10}", t.ty, t.tensors, bytes(t.bytes)));
    }
    match (&info.tokenizer, &info.tokenizer_problem) {
        (Some(t), _) => tokenizer(&mut lines, t),
        (None, Some(problem)) => lines.add("tokenizer", &format!("cannot be used: {problem}")),
        (None, None) => lines.add("tokenizer", "none"),
    }
    memory(&mut lines, &info.memory);
    for t in info.tensors.iter().flatten() {
        let _ = writeln!(lines.0, "{:<7} {:>10}  {} {:?}", t.ty, bytes(t.bytes), t.name, t.shape);
    }
    lines.0
}

/// A label and a text per line.
struct Lines(String);

impl Lines {
    fn add(&mut self, label: &str, text: &str) {
        // A string takes every write.
        let _ = writeln!(self.0, "{label:<13} {}", text.trim_end());
    }
}

fn sizes(lines: &mut Lines, info: &Info) {
    let s = &info.sizes;
    lines.add("architecture", s.architecture);
    lines.add("layers", &format!("{} of width {}, feed-forward {}", s.layers, s.hidden, s.ffn));
    let kinds: Vec<String> = info.layer_kinds.iter().map(|k| format!("{} {}", k.layers, k.kind)).collect();
    lines.add("layer kinds", &kinds.join(", "));
    if let Some(e) = &s.experts {
        let text = format!("{} of width {}, {} per token", e.count, e.ffn, e.used);
        let in_some = format!("{text}, in {} of {} layers", e.layers, s.layers);
        lines.add("experts", if e.layers == s.layers { &text } else { &in_some });
    }
    lines.add(
        "attention",
        &format!("{} heads of {}, {} for keys and values", s.heads, s.head_dim, s.kv_heads),
    );
    let rope = match s.rope_dims {
        0 => "nothing is rotated".to_string(),
        _ => format!("rope theta {}", s.rope_theta),
    };
    lines.add("context", &format!("{} tokens, {rope}", s.context));
    lines.add("vocabulary", &s.vocab.to_string());
    if let Some(t) = &info.ngram_table {
        let place = if t.on_disk { "on disk" } else { "in memory" };
        let text = format!("{}: {} rows, {} that stay {place}", t.tensor, t.rows, bytes(t.bytes));
        lines.add("n-gram table", &text);
    }
    let draft = match (info.draft_head, &info.draft_head_kind) {
        (true, Some(kind)) => format!("yes: {kind} (run --speculate)"),
        (false, Some(why)) => format!("no: {why}"),
        (_, None) => "no".to_string(),
    };
    lines.add("draft head", &draft);
}

fn parameters(lines: &mut Lines, info: &Info) {
    let mut text = count(info.parameters);
    if let Some(t) = &info.ngram_table {
        text += &format!(", {} of them in the n-gram table", count(t.parameters));
    }
    if info.draft_parameters > 0 {
        text += &format!(", {} in the draft head", count(info.draft_parameters));
    }
    if info.sizes.experts.is_some() {
        text += &format!("; a token is computed with {}", count(info.active_parameters));
    }
    lines.add("parameters", &text);
}

fn tokenizer(lines: &mut Lines, t: &Tokenizer) {
    let id = |id: Option<u32>| id.map_or_else(|| "none".to_string(), |id| id.to_string());
    let ends: Vec<String> = t.end_tokens.iter().map(ToString::to_string).collect();
    let ends = if ends.is_empty() { "none".to_string() } else { ends.join(", ") };
    let text =
        format!("{}; {} tokens, begin {}, end {}, stops at {ends}", t.kind, t.tokens, id(t.bos), id(t.eos));
    lines.add("tokenizer", &text);
    lines.add("chat template", if t.chat_template { "yes" } else { "no (use --raw)" });
}

fn memory(lines: &mut Lines, m: &MemoryUse) {
    let file = if m.file_bytes > 0 { format!("{} in files, ", bytes(m.file_bytes)) } else { String::new() };
    let (packed, stored) = (bytes(m.cpu_weight_bytes), bytes(m.cpu_weight_bytes_no_repack));
    lines.add(
        "weights",
        &format!("{file}{packed} in memory on the CPU, repacked ({stored} with --no-repack)"),
    );
    lines.add("KV per token", &m.kv_bytes_per_token.text("in"));
    lines.add("KV in all", &format!("{} at {} tokens", m.kv_bytes_at_context.text("in"), m.context));
    if m.recurrent_bytes_per_sequence > 0 {
        let text = format!("{} per sequence, whatever its length", bytes(m.recurrent_bytes_per_sequence));
        lines.add("recurrent", &text);
    }
    let windows = m.window_bytes_per_sequence;
    if windows.f16 > 0 {
        lines.add("windows", &format!("{} per sequence, whatever its length", windows.text("in")));
    }
    let text = format!("{}: weights and one such sequence", m.bytes_at_context.text("with"));
    lines.add("in all", &text);
}
