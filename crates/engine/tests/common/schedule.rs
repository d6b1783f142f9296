//! What schedules over sequences are made of, the engine that they run on, and straight runs to compare with.

use std::collections::HashMap;
use std::sync::Arc;

use minfer_cpu::Isa;
use minfer_engine::{Checkpoint, Chunk, Engine, EngineOptions, KvFormat, Outs};
use proptest::prelude::*;

use super::flaky::{Fault, Flaky, Switch};
use super::tiny::tokens;
use super::{cpu, data, open};

/// Longer than two pages.
pub const CONTEXT: usize = 160;
/// Sequences that a schedule keeps at one time: more than the engine is opened for.
pub const LIVE: usize = 5;
/// Rows of the largest window that the engine promises slots for.
pub const WINDOW: usize = 8;

pub fn hybrid() -> Checkpoint {
    Checkpoint::open(&data("oracle/qwen4_exp")).unwrap()
}

/// Ids below both tiny models' vocabularies.
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
}

impl Setup {
    pub fn engine(self, model: &Checkpoint, switch: &Switch) -> Engine {
        let options = EngineOptions {
            kv_format: self.kv,
            context: Some(CONTEXT),
            sequences: self.sequences,
            max_rows: 3 * CONTEXT,
            max_outs: 3 * CONTEXT,
            checkpoint_every: self.every,
            checkpoints: self.checkpoints,
            ..EngineOptions::new(vec![Arc::new(Flaky::new(switch))])
        };
        open(model, options)
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
    pub fn new(model: &Checkpoint, kv: KvFormat) -> Straight {
        let options = EngineOptions {
            kv_format: kv,
            context: Some(CONTEXT),
            max_rows: CONTEXT,
            max_outs: CONTEXT,
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
    /// Everything that is refused in the sequence's condition.
    Refused(usize),
}

pub fn parts() -> impl Strategy<Value = Vec<Part>> {
    let size = prop_oneof![2 => 1usize..70, 2 => Just(1usize), 3 => 1usize..=WINDOW];
    let part = (0..LIVE, size, 0u8..5, any::<bool>()).prop_map(|(which, n, kind, all)| {
        let window = kind < 2;
        Part { which, n: if window { n.min(WINDOW) } else { n }, window, all }
    });
    prop::collection::vec(part, 1..4)
}

pub fn schedule() -> impl Strategy<Value = Vec<Move>> {
    let which = 0..LIVE;
    let fault = prop::sample::select(Fault::ALL.to_vec());
    let one = prop_oneof![
        10 => parts().prop_map(Move::Step),
        2 => (fault, parts()).prop_map(|(fault, parts)| Move::Fault(fault, parts)),
        8 => (which.clone(), 0usize..=16).prop_map(|(s, share)| Move::Commit(s, share)),
        3 => which.clone().prop_map(Move::Fork),
        3 => (which.clone(), 0usize..=16, 1usize..50).prop_map(|(s, share, n)| Move::Truncate(s, share, n)),
        1 => which.clone().prop_map(Move::Release),
        2 => which.prop_map(Move::Refused),
    ];
    prop::collection::vec(one, 20..45)
}

pub fn setup() -> impl Strategy<Value = Setup> {
    let kv = prop::sample::select(vec![KvFormat::F32, KvFormat::F16]);
    let every = prop::sample::select(vec![8usize, 64]);
    (kv, every, prop::sample::select(vec![0usize, 2, 64]), 2usize..7)
        .prop_map(|(kv, every, checkpoints, sequences)| Setup { kv, every, checkpoints, sequences })
}
