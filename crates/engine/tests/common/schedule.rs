//! What schedules over sequences are made of, the engine that they run on, and straight runs to compare with.

use std::collections::HashMap;
use std::sync::Arc;

use minfer_cpu::Isa;
use minfer_engine::{Checkpoint, Chunk, Engine, EngineOptions, KvFormat, Outs};
use minfer_format::BlockType;
use minfer_graph::PAGE;
use proptest::prelude::*;

use super::flaky::{Fault, Flaky, Switch};
use super::tiny::{Tiny, tokens};
use super::{cpu, data, open};

/// Sequences that a schedule keeps at one time: more than the engine is opened for.
pub const LIVE: usize = 5;
/// Rows of the largest window that the engine promises slots for.
pub const WINDOW: usize = 8;

/// A tiny model with every kind of layer of its architecture.
pub struct Family {
    pub name: &'static str,
    pub model: Checkpoint,
    /// Longer than two pages.
    pub context: usize,
    /// Most tokens that a schedule adds at a time.
    pub chunk: usize,
    /// Schedules that are played.
    pub cases: u32,
    pub recurrent: bool,
}

impl Family {
    fn new(name: &'static str, model: Checkpoint, cases: u32) -> Family {
        Family { name, model, context: 160, chunk: 70, cases, recurrent: true }
    }

    fn oracle(name: &'static str, cases: u32) -> Family {
        Family::new(name, Checkpoint::open(&data(&format!("oracle/{name}"))).unwrap(), cases)
    }

    pub fn dense() -> Family {
        Family { recurrent: false, ..Family::new("qwen3", Tiny::new(BlockType::F32, false).open(), 12) }
    }

    pub fn qwen4_exp() -> Family {
        Family::oracle("qwen4_exp", 20)
    }

    pub fn glm5_next() -> Family {
        Family::oracle("glm5_next", 16)
    }

    /// Its widest compressor closes a window every 128 tokens.
    pub fn deepseek_v4() -> Family {
        Family { context: 288, chunk: 150, ..Family::oracle("deepseek_v4", 10) }
    }

    pub fn all() -> [Family; 4] {
        [Family::dense(), Family::qwen4_exp(), Family::glm5_next(), Family::deepseek_v4()]
    }

    pub fn setup(&self, every: usize, checkpoints: usize, sequences: usize) -> Setup {
        Setup { kv: KvFormat::F16, every, checkpoints, sequences, context: self.context }
    }

    pub fn straight(&self, kv: KvFormat) -> Straight {
        Straight::new(&self.model, kv, self.context)
    }
}

/// Ids below all tiny models' vocabularies.
pub fn ids(n: usize, seed: u64) -> Vec<u32> {
    tokens(n, seed).iter().map(|t| t % 131).collect()
}

/// How a schedule's engine is opened.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    pub kv: KvFormat,
    pub every: usize,
    pub checkpoints: usize,
    pub sequences: usize,
    pub context: usize,
}

impl Setup {
    pub fn engine(self, model: &Checkpoint, switch: &Switch) -> Engine {
        let options = EngineOptions {
            kv_format: self.kv,
            context: Some(self.context),
            sequences: self.sequences,
            max_rows: 3 * self.context,
            max_outs: 3 * self.context,
            checkpoint_every: self.every,
            checkpoints: self.checkpoints,
            ..EngineOptions::new(vec![Arc::new(Flaky::new(switch))])
        };
        open(model, options)
    }

    pub fn pages(self) -> usize {
        self.sequences * self.context.div_ceil(PAGE)
    }

    pub fn slots(self) -> usize {
        2 * self.sequences + self.checkpoints + WINDOW
    }
}

/// Rows of straight runs, by the tokens up to and with the row's.
pub struct Straight {
    pub engine: Engine,
    pub rows: HashMap<Vec<u32>, Vec<u32>>,
}

impl Straight {
    pub fn new(model: &Checkpoint, kv: KvFormat, context: usize) -> Straight {
        let options = EngineOptions {
            kv_format: kv,
            context: Some(context),
            max_rows: context,
            max_outs: context,
            ..EngineOptions::new(cpu(1, Isa::detect()))
        };
        Straight { engine: open(model, options), rows: HashMap::new() }
    }

    /// Bits of the last row after `all`.
    pub fn row(&mut self, all: &[u32]) -> &[u32] {
        if !self.rows.contains_key(all) {
            let sequence = self.engine.new_sequence();
            let chunk = Chunk { sequence, tokens: all, outs: Outs::All, window: false };
            let logits = self.engine.step(&[chunk]).unwrap();
            for i in 0..logits.len() {
                self.rows.insert(all[..=i].to_vec(), bits(logits.row(i)));
            }
            self.engine.release(sequence).unwrap();
        }
        let row = &self.rows[all];
        assert!(row.iter().all(|&b| f32::from_bits(b).is_finite()), "logits are numbers");
        row
    }
}

pub fn bits(row: &[f32]) -> Vec<u32> {
    row.iter().map(|x| x.to_bits()).collect()
}

/// Tokens that a sequence adds in a step of a schedule.
#[derive(Clone, Copy, Debug)]
pub struct Part {
    pub which: usize,
    pub n: usize,
    pub window: bool,
    pub all: bool,
}

/// The way of a snapshot back into an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// At once.
    Memory,
    /// Through a file.
    File,
    /// Every sequence through a file, into an engine that is opened anew.
    Reload,
}

/// What a schedule does next. `which` counts the live sequences, round and round.
#[derive(Clone, Debug)]
pub enum Move {
    Step(Vec<Part>),
    /// A step that fails in the given way.
    Fault(Fault, Vec<Part>),
    /// Keeps this share of the window, in 16ths.
    Commit(usize, usize),
    Fork(usize),
    /// Goes back to this share of its length, in 16ths, then appends the same tokens again, so many at a time.
    Truncate(usize, usize, usize),
    Release(usize),
    /// Takes a snapshot and restores it, then appends so many tokens.
    Restore(usize, Way, usize),
    /// A snapshot or a restore that fails after so many units of state.
    FaultyRestore(usize, Fault, usize),
    /// Everything that is refused in the sequence's condition.
    Refused(usize),
}

pub fn parts(chunk: usize) -> impl Strategy<Value = Vec<Part>> {
    let size = prop_oneof![2 => 1usize..chunk, 2 => Just(1usize), 3 => 1usize..=WINDOW];
    let part = (0..LIVE, size, 0u8..5, any::<bool>()).prop_map(|(which, n, kind, all)| {
        let window = kind < 2;
        Part { which, n: if window { n.min(WINDOW) } else { n }, window, all }
    });
    prop::collection::vec(part, 1..4)
}

pub fn schedule(chunk: usize) -> impl Strategy<Value = Vec<Move>> {
    let which = 0..LIVE;
    let fault = prop::sample::select(Fault::OF_STEPS.to_vec());
    let way = prop_oneof![3 => Just(Way::Memory), 2 => Just(Way::File), 1 => Just(Way::Reload)];
    let of_state = prop::sample::select(vec![Fault::ReadState, Fault::WriteState]);
    let one = prop_oneof![
        10 => parts(chunk).prop_map(Move::Step),
        2 => (fault, parts(chunk)).prop_map(|(fault, parts)| Move::Fault(fault, parts)),
        8 => (which.clone(), 0usize..=16).prop_map(|(s, share)| Move::Commit(s, share)),
        3 => which.clone().prop_map(Move::Fork),
        3 => (which.clone(), 0usize..=16, 1usize..50).prop_map(|(s, share, n)| Move::Truncate(s, share, n)),
        1 => which.clone().prop_map(Move::Release),
        4 => (which.clone(), way, 1usize..20).prop_map(|(s, way, n)| Move::Restore(s, way, n)),
        3 => (which.clone(), of_state, 0usize..8).prop_map(|(s, fault, n)| Move::FaultyRestore(s, fault, n)),
        2 => which.prop_map(Move::Refused),
    ];
    prop::collection::vec(one, 20..45)
}

pub fn setup(context: usize) -> impl Strategy<Value = Setup> {
    let kv = prop::sample::select(KvFormat::ALL.to_vec());
    let every = prop::sample::select(vec![8usize, 64]);
    (kv, every, prop::sample::select(vec![0usize, 2, 64]), 2usize..7).prop_map(
        move |(kv, every, checkpoints, sequences)| Setup { kv, every, checkpoints, sequences, context },
    )
}
