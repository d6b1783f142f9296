//! What is done to a template's source before the engine parses it: one limit, and one tag of
//! `transformers` that the engine does not know.

/// Writes `{% generation %}` blocks as blocks that are always taken. In `transformers` they mark what the
/// assistant said, for training; a rendering is the same without them.
pub(super) fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let Some(len) = rest[start..].find("%}") else { break };
        let (before, tag) = (&rest[..start], &rest[start..start + len + 2]);
        let inner = tag[2..tag.len() - 2].trim_matches(['-', '+']).trim();
        out.push_str(before);
        match inner {
            "generation" => out.push_str(&tag.replace(inner, "if true")),
            "endgeneration" => out.push_str(&tag.replace(inner, "endif")),
            _ => out.push_str(tag),
        }
        rest = &rest[start + len + 2..];
    }
    out + rest
}

/// The line of the first tag that is longer than `limit` bytes. Strings and braces inside are respected,
/// comments are left out; a `{{` in a raw block counts as a tag.
pub(super) fn line_of_longer_tag(source: &str, limit: usize) -> Option<usize> {
    let bytes = source.as_bytes();
    let mut at = 0;
    while at + 1 < bytes.len() {
        let start = at;
        match &bytes[at..at + 2] {
            b"{#" => at += source[at..].find("#}").unwrap_or(bytes.len() - at),
            b"{{" | b"{%" => at = end_of_tag(bytes, at + 2),
            _ => at += 1,
        }
        if at - start > limit && bytes[start + 1] != b'#' {
            return Some(1 + bytes[..start].iter().filter(|&&b| b == b'\n').count());
        }
    }
    None
}

/// Where the tag ends whose content starts at `at`.
fn end_of_tag(bytes: &[u8], mut at: usize) -> usize {
    let (mut braces, mut quote) = (0usize, None);
    while at < bytes.len() {
        match (bytes[at], quote) {
            (b'\\', Some(_)) => at += 1,
            (b, Some(q)) if b == q => quote = None,
            (_, Some(_)) => {}
            (b @ (b'"' | b'\''), None) => quote = Some(b),
            (b'{', None) => braces += 1,
            (b'}' | b'%', None) if braces == 0 && bytes.get(at + 1) == Some(&b'}') => return at + 2,
            (b'}', None) => braces = braces.saturating_sub(1),
            _ => {}
        }
        at += 1;
    }
    bytes.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_tags_are_found() {
        let long = |source| line_of_longer_tag(source, 20);
        assert_eq!(long("text without any tag that is long {{ a }} {% b %} and on"), None);
        assert_eq!(long("a\n{{ '}}' ~ 'and so on' }}"), Some(2));
        assert_eq!(long("{{ {1: {}} ~ 'and so on' }}"), Some(1));
        assert_eq!(long("{% set x = 'it\\'s %}' %} é"), Some(1));
        assert_eq!(long("{# a comment of any length {{ #}{{ b }}"), None);
        assert_eq!(long("{{ never closed, and long"), Some(1));
        assert_eq!(long("{"), None);
    }

    #[test]
    fn generation_tags_are_only_marks() {
        let source = "a{%- generation -%} b {%endgeneration%}{% if generation %}c{% endif %}";
        let expected = "a{%- if true -%} b {%endif%}{% if generation %}c{% endif %}";
        assert_eq!(without_generation_tags(source), expected);
        assert_eq!(without_generation_tags("{% é"), "{% é");
    }
}
