//! The pre-tokenizers that GGUF files name in `tokenizer.ggml.pre`: one line per name.
//!
//! The expressions are those of the models' own `tokenizer.json`; each is applied to what the one before
//! it left, and both matches and gaps become words. `nfc` is the normaliser of that file, which llama.cpp
//! leaves out: texts that are not in NFC get the ids that the model was trained on.

/// How texts of one family of vocabularies are prepared.
pub(crate) struct Pre {
    pub(crate) names: &'static [&'static str],
    pub(crate) splits: &'static [&'static str],
    /// Texts are brought to Unicode normal form C.
    pub(crate) nfc: bool,
    /// A word that is a token is that token, whatever the merges say.
    pub(crate) ignore_merges: bool,
    /// Whether a BOS token is wanted when `tokenizer.ggml.add_bos_token` is absent.
    pub(crate) add_bos: bool,
}

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
/// Digits in groups of up to three.
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Digits alone.
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Combining marks stay with their letters.
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const DEEPSEEK3: [&str; 3] = [
    r"\p{N}{1,3}",
    "[\u{4E00}-\u{9FA5}\u{3040}-\u{309F}\u{30A0}-\u{30FF}]+",
    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##,
];

#[rustfmt::skip]
const TABLE: [Pre; 8] = [
    Pre { names: &["llama-bpe", "llama3", "llama-v3"], splits: &[LLAMA3], nfc: false, ignore_merges: true, add_bos: true },
    Pre { names: &["qwen2", "deepseek-r1-qwen"], splits: &[QWEN2], nfc: true, ignore_merges: false, add_bos: false },
    Pre { names: &["qwen35"], splits: &[QWEN35], nfc: true, ignore_merges: false, add_bos: false },
    Pre { names: &["gpt-2"], splits: &[GPT2], nfc: false, ignore_merges: false, add_bos: false },
    Pre { names: &["smollm", "starcoder", "refact"], splits: &[r"\p{N}", GPT2], nfc: false, ignore_merges: false, add_bos: false },
    Pre { names: &["deepseek-v3", "joyai-llm"], splits: &DEEPSEEK3, nfc: false, ignore_merges: false, add_bos: false },
    Pre { names: &["glm4"], splits: &[LLAMA3], nfc: false, ignore_merges: true, add_bos: false },
    Pre { names: &["tekken"], splits: &[TEKKEN], nfc: false, ignore_merges: true, add_bos: true },
];

/// The entry of a name.
pub(crate) fn find(name: &str) -> Option<&'static Pre> {
    TABLE.iter().find(|pre| pre.names.contains(&name))
}

/// All known names, for messages.
pub(crate) fn known() -> String {
    let names: Vec<&str> = TABLE.iter().flat_map(|pre| pre.names).copied().collect();
    names.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_occurs_once() {
        let mut names: Vec<&str> = TABLE.iter().flat_map(|pre| pre.names).copied().collect();
        names.sort_unstable();
        let count = names.len();
        names.dedup();
        assert_eq!(names.len(), count);
    }
}
