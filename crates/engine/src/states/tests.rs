//! Slots and checkpoints without an engine.

use super::*;
use crate::engine::Outs;
use crate::sequence::SequenceId;

const TOKENS: [u32; 100] = [0; 100];

fn recurrent(every: usize, checkpoints: usize, sequences: usize) -> Recurrent {
    let options =
        EngineOptions { checkpoint_every: every, checkpoints, sequences, ..EngineOptions::new(vec![]) };
    Recurrent::new(&options, None, 0)
}

fn chunk(sequence: u32, n: usize, window: bool) -> Chunk<'static> {
    Chunk { sequence: SequenceId(sequence), tokens: &TOKENS[..n], outs: Outs::None, window }
}

/// What a step does for the sequences `0..`.
fn step(recurrent: &mut Recurrent, sequences: &mut BTreeMap<u32, Sequence>, chunks: &[Chunk<'_>]) {
    recurrent.make_room(chunks, sequences);
    let start = |s: &BTreeMap<u32, Sequence>, c: &Chunk<'_>| s[&c.sequence.0].len();
    let plan = |i: usize| recurrent.plan(start(sequences, &chunks[i]), &chunks[i..]).unwrap();
    let moves: Vec<_> = (0..chunks.len()).map(plan).collect();
    for (chunk, state_move) in chunks.iter().zip(moves) {
        let sequence = sequences.get_mut(&chunk.sequence.0).unwrap();
        recurrent.apply(&mut sequence.state, state_move);
        sequence.tokens.extend(chunk.tokens);
    }
}

fn sequences(n: u32) -> BTreeMap<u32, Sequence> {
    (0..n).map(|id| (id, Sequence::default())).collect()
}

fn lengths(sequence: &Sequence) -> Vec<usize> {
    sequence.state.checkpoints.iter().map(|c| c.len).collect()
}

#[test]
fn the_oldest_checkpoints_give_way() {
    let (mut r, mut s) = (recurrent(10, 4, 1), sequences(1));
    for _ in 0..5 {
        step(&mut r, &mut s, &[chunk(0, 100, false)]);
    }
    let kept = lengths(&s[&0]);
    assert!(kept.ends_with(&[460, 470, 480, 490, 500]), "{kept:?}");
    assert_eq!(r.free() + kept.len(), r.slots(), "the last checkpoint is the state too");
}

#[test]
fn checkpoints_leave_slots_for_later_chunks() {
    let (mut r, mut s) = (recurrent(1, 20, 2), sequences(2));
    step(&mut r, &mut s, &[chunk(0, 50, false), chunk(1, 8, true)]);
    assert_eq!(s[&1].state.window.as_ref().unwrap().rows.len(), 8);
    assert!(s.values().all(|s| s.state.slot.is_some()));
}

#[test]
fn kept_rows_of_a_window_leave_checkpoints() {
    let (mut r, mut s) = (recurrent(4, 8, 1), sequences(1));
    step(&mut r, &mut s, &[chunk(0, 3, false)]);
    step(&mut r, &mut s, &[chunk(0, 8, true)]);
    let state = &mut s.get_mut(&0).unwrap().state;
    let window = state.window.take().unwrap();
    r.settle(state, window, 5);
    assert_eq!(lengths(&s[&0]), [4, 8]);
    let state = &mut s.get_mut(&0).unwrap().state;
    assert_eq!(state.slot, Some(state.checkpoints[1].slot));
    assert_eq!(r.go_back(state, 7), 4);
    assert_eq!(r.free(), r.slots() - 1);
    r.release(s.remove(&0).unwrap().state);
    assert_eq!(r.free(), r.slots());
}

#[test]
fn an_empty_window_keeps_the_state() {
    let (mut r, mut s) = (recurrent(0, 0, 1), sequences(1));
    step(&mut r, &mut s, &[chunk(0, 3, false)]);
    let slot = s[&0].state.slot;
    step(&mut r, &mut s, &[chunk(0, 0, true)]);
    let state = &mut s.get_mut(&0).unwrap().state;
    let window = state.window.take().unwrap();
    r.settle(state, window, 0);
    assert!(state.slot.is_some() && state.slot == slot);
}
