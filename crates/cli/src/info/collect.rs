//! Reading what there is to say about a model.

use minfer_engine::{Checkpoint, EngineError, Hyper, KvFormat, Text, cpu_devices_with};
use minfer_graph::{Graph, WeightId, WeightUse};
use minfer_runtime::WeightOptions;
use serde::Serialize;

use crate::error::Failure;
use crate::info::structure::{self, LayerKind, NgramTable};
use crate::info::tensors::{self, Tensor, TypeUse, printable};
use crate::model::context_size;
use crate::units;

#[derive(Serialize)]
pub(super) struct Info {
    pub(super) source: String,
    /// `GGUF v3`, `Hugging Face directory`, `shape`.
    pub(super) format: String,
    /// The name that the file gives the model.
    pub(super) name: Option<String>,
    pub(super) sizes: Sizes,
    /// By how they mix tokens, most layers first.
    pub(super) layer_kinds: Vec<LayerKind>,
    /// Whether the model can draft for itself.
    pub(super) draft_head: bool,
    pub(super) draft_head_kind: Option<String>,
    pub(super) ngram_table: Option<NgramTable>,
    /// Of all tensors, the n-gram table's and the draft head's among them.
    pub(super) parameters: u64,
    /// Of the draft head alone, which shares some with the model.
    pub(super) draft_parameters: u64,
    /// That a token is computed with, without the draft head's.
    pub(super) active_parameters: u64,
    /// By type, most bytes first.
    pub(super) tensor_types: Vec<TypeUse>,
    pub(super) tokenizer: Option<Tokenizer>,
    /// Why there is no tokenizer.
    pub(super) tokenizer_problem: Option<String>,
    pub(super) memory: MemoryUse,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) tensors: Option<Vec<Tensor>>,
}

#[derive(Serialize)]
pub(super) struct Sizes {
    pub(super) architecture: &'static str,
    pub(super) layers: usize,
    pub(super) hidden: usize,
    pub(super) ffn: usize,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) head_dim: usize,
    pub(super) vocab: usize,
    pub(super) context: usize,
    pub(super) rope_theta: f32,
    /// Dimensions of each head that are rotated.
    pub(super) rope_dims: usize,
    pub(super) experts: Option<ExpertSizes>,
}

#[derive(Serialize)]
pub(super) struct ExpertSizes {
    pub(super) count: usize,
    pub(super) used: usize,
    pub(super) ffn: usize,
    /// How many layers have them.
    pub(super) layers: usize,
}

#[derive(Serialize)]
pub(super) struct Tokenizer {
    pub(super) kind: String,
    pub(super) tokens: usize,
    pub(super) bos: Option<u32>,
    pub(super) eos: Option<u32>,
    pub(super) end_tokens: Vec<u32>,
    pub(super) chat_template: bool,
}

#[derive(Serialize)]
pub(super) struct MemoryUse {
    /// Of the files; 0 for a shape.
    pub(super) file_bytes: u64,
    /// In the CPU's memory, in its layout.
    pub(super) cpu_weight_bytes: u64,
    /// The same with `--no-repack`: what does not lie in a mapped file as it is wanted.
    pub(super) cpu_weight_bytes_no_repack: u64,
    pub(super) kv_bytes_per_token: KvBytes,
    pub(super) default_context: usize,
    pub(super) kv_bytes_at_default_context: KvBytes,
    /// Of a sequence, whatever its length.
    pub(super) recurrent_bytes_per_sequence: u64,
    /// Of the rows of which a sequence keeps the last ones only; there is room for those of a step besides.
    pub(super) window_bytes_per_sequence: KvBytes,
    /// The one asked for, else the default.
    pub(super) context: usize,
    pub(super) kv_bytes_at_context: KvBytes,
    /// Weights, and the state of one sequence of that length; what a step works with is not among it.
    pub(super) bytes_at_context: KvBytes,
}

#[derive(Clone, Copy, Serialize)]
pub(super) struct KvBytes {
    pub(super) f16: u64,
    pub(super) q8_0: u64,
    pub(super) f32: u64,
}

impl KvBytes {
    /// `of` each format.
    fn each(of: impl Fn(KvFormat) -> u64) -> KvBytes {
        KvBytes { f16: of(KvFormat::F16), q8_0: of(KvFormat::Q8_0), f32: of(KvFormat::F32) }
    }

    fn get(&self, format: KvFormat) -> u64 {
        match format {
            KvFormat::F16 => self.f16,
            KvFormat::Q8_0 => self.q8_0,
            KvFormat::F32 => self.f32,
        }
    }

    /// `2 B in f16, 1 B in q8_0, 4 B in f32`, with the word between number and format.
    pub(super) fn text(&self, word: &str) -> String {
        let one = |n, format: KvFormat| format!("{} {word} {}", units::bytes(n), format.name());
        let texts = [KvFormat::F16, KvFormat::Q8_0, KvFormat::F32].map(|f| one(self.get(f), f));
        texts.join(", ")
    }
}

impl Info {
    /// `context`: tokens for which state is counted, if not the default.
    pub(super) fn collect(
        model: &Checkpoint,
        context: Option<usize>,
        list_tensors: bool,
    ) -> Result<Info, Failure> {
        let loaded = minfer_model::load(model)?;
        let graph = loaded.graph(model, 1)?;
        let context = context_size(context, loaded.hyper())?;
        let (head, table) = (loaded.draft_head(model, 1)?, loaded.ngram_table(model)?);
        let tensors = tensors::list(model, &graph, head.as_ref(), table.as_ref());
        let (tokenizer, tokenizer_problem) = match tokenizer(model) {
            Ok(tokenizer) => (tokenizer, None),
            Err(error) => (None, Some(error.to_string())),
        };
        let (format, name) = format(model);
        Ok(Info {
            source: model.name(),
            format,
            name,
            sizes: Sizes::new(loaded.hyper(), &graph),
            layer_kinds: structure::layer_kinds(&graph),
            draft_head: head.is_some(),
            draft_head_kind: structure::draft_kind(model, head.as_ref()),
            ngram_table: structure::ngram_table(model, table.as_ref()),
            parameters: tensors.iter().map(|t| structure::parameters(&t.shape)).sum(),
            draft_parameters: structure::draft_parameters(&graph, head.as_ref()),
            active_parameters: structure::active_parameters(&graph, loaded.hyper()),
            tensor_types: tensors::by_type(&tensors),
            tokenizer,
            tokenizer_problem,
            memory: memory(model, &graph, loaded.hyper(), context)?,
            tensors: list_tensors.then_some(tensors),
        })
    }
}

impl Sizes {
    fn new(h: &Hyper, graph: &Graph) -> Sizes {
        let (experts, layers) = (h.experts.as_ref(), structure::expert_layers(graph));
        Sizes {
            architecture: h.arch,
            layers: h.layers,
            hidden: h.hidden,
            ffn: h.ffn,
            heads: h.heads,
            kv_heads: h.kv_heads,
            head_dim: h.head_dim,
            vocab: h.vocab,
            context: h.context,
            rope_theta: h.rope_theta,
            rope_dims: h.rope_dims,
            experts: experts.map(|e| ExpertSizes { count: e.count, used: e.used, ffn: e.ffn, layers }),
        }
    }
}

fn format(model: &Checkpoint) -> (String, Option<String>) {
    match model {
        Checkpoint::Gguf(g) => {
            let name = g.metadata().opt_string("general.name").ok().flatten();
            (format!("GGUF v{}", g.version()), name.map(printable))
        }
        Checkpoint::Hf(d) => {
            let name = d.config().get("_name_or_path").and_then(|n| n.as_str());
            ("Hugging Face directory".to_string(), name.map(printable))
        }
        Checkpoint::Shape(_) => ("shape".to_string(), None),
    }
}

/// `None` for a shape, which has no text side.
fn tokenizer(model: &Checkpoint) -> Result<Option<Tokenizer>, EngineError> {
    let kind = match model {
        Checkpoint::Shape(_) => return Ok(None),
        Checkpoint::Hf(_) => "tokenizer.json".to_string(),
        Checkpoint::Gguf(g) => {
            let text = |key: &str| g.metadata().opt_string(key).ok().flatten().map(printable);
            let kind = text("tokenizer.ggml.model").unwrap_or_default();
            text("tokenizer.ggml.pre").map_or_else(|| kind.clone(), |pre| format!("{kind}, {pre}"))
        }
    };
    let text = Text::open(model)?;
    let t = &text.tokenizer;
    Ok(Some(Tokenizer {
        kind,
        tokens: t.vocab_size(),
        bos: t.bos(),
        eos: t.eos(),
        end_tokens: t.end_tokens().to_vec(),
        chat_template: text.template.is_some(),
    }))
}

fn memory(model: &Checkpoint, graph: &Graph, hyper: &Hyper, context: usize) -> Result<MemoryUse, Failure> {
    let on_cpu = |repack: bool| -> Result<u64, Failure> {
        let weights = WeightOptions { repack, ..WeightOptions::default() };
        let devices = cpu_devices_with(Some(1), weights)?;
        let bytes = |(w, how): (WeightId, WeightUse)| {
            devices.iter().filter_map(|d| d.weight_bytes(&graph.weights[w.index()], how)).sum::<u64>()
        };
        Ok(graph.weight_uses().into_iter().map(bytes).sum())
    };
    let kv =
        |tokens: u64| KvBytes::each(|f| units::kv_bytes_per_token(&graph.states, f).saturating_mul(tokens));
    let default_context = context_size(None, hyper)?;
    let cpu_weight_bytes = on_cpu(true)?;
    let (recurrent, at_context) = (structure::recurrent_bytes(graph), kv(context as u64));
    let windows = KvBytes::each(|f| units::window_bytes(&graph.states, f));
    let total = |kv: u64| kv.saturating_add(recurrent).saturating_add(cpu_weight_bytes);
    Ok(MemoryUse {
        file_bytes: model.file_bytes(),
        cpu_weight_bytes,
        cpu_weight_bytes_no_repack: on_cpu(false)?,
        kv_bytes_per_token: kv(1),
        default_context,
        kv_bytes_at_default_context: kv(default_context as u64),
        recurrent_bytes_per_sequence: recurrent,
        window_bytes_per_sequence: windows,
        context,
        kv_bytes_at_context: at_context,
        bytes_at_context: KvBytes::each(|f| total(at_context.get(f).saturating_add(windows.get(f)))),
    })
}
