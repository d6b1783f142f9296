//! The softmax of some query heads in progress: scores, weights and sums of the tile at hand, of the range and of all
//! ranges so far.

use std::ops::Range;

use minfer_graph::PAGE;

use super::{AttendShape, RowRun, Shares, Tile, padded};
use crate::Kernels;

/// Running maximum and sum of one query head's softmax.
#[derive(Clone, Copy, Debug)]
pub(super) struct Running {
    pub(super) max: f32,
    pub(super) sum: f32,
}

impl Running {
    pub(super) const EMPTY: Running = Running { max: f32::NEG_INFINITY, sum: 0.0 };

    /// Merges the softmax of a range into that of the ranges before it.
    pub(super) fn merge(&mut self, kernels: &Kernels, range: Running, range_acc: &[f32], acc: &mut [f32]) {
        let max = if range.max > self.max { range.max } else { self.max };
        let (keep, weight) = (crate::math::exp(self.max - max), crate::math::exp(range.max - max));
        *self = Running { max, sum: self.sum.mul_add(keep, range.sum * weight) };
        // SAFETY: `Kernels` holds only what this machine can run.
        unsafe { (kernels.merge)(range_acc, weight, keep, acc) }
    }
}

/// Working memory of [`Kernels::attend`](crate::Kernels::attend), one per thread, so that a call allocates nothing.
#[derive(Debug)]
pub struct Scratch {
    /// Query heads of all rows that there is room for.
    pub(super) queries: usize,
    /// `[queries, k_dim]`.
    pub(super) q: Vec<f32>,
    pub(super) room: Room,
    pub(super) fold: Folds,
    /// Where the rows of one tile lie, at most [`PAGE`] places.
    pub(super) runs: Vec<RowRun>,
}

/// Widened keys and values of one tile: [`PAGE`] rows each.
#[derive(Debug)]
pub(super) struct Room {
    pub(super) k: Vec<f32>,
    pub(super) v: Vec<f32>,
}

/// The state of the softmax of several query heads.
#[derive(Debug)]
pub(super) struct Folds {
    /// `[queries]`.
    pub(super) running: Vec<Running>,
    keep: Vec<f32>,
    /// `[queries, PAGE]`.
    weights: Vec<f32>,
    /// `[queries, v_dim]`.
    pub(super) acc: Vec<f32>,
    /// The same of all ranges before this one.
    all: Vec<Running>,
    all_acc: Vec<f32>,
}

impl Scratch {
    /// Room for a task of [`Shares`] in a layer of this shape: up to [`super::ROW_BLOCK`] query rows with one KV head, or fewer
    /// rows with several.
    pub fn new(shape: &AttendShape) -> Scratch {
        Scratch::of_queries(shape, Shares::queries(shape))
    }

    /// Room for one row with heads of one KV head.
    pub fn of_one_row(shape: &AttendShape) -> Scratch {
        Scratch::of_queries(shape, shape.group())
    }

    pub(super) fn of_queries(shape: &AttendShape, queries: usize) -> Scratch {
        Scratch {
            queries,
            q: vec![0.0; queries * shape.k_dim],
            room: Room { k: vec![0.0; PAGE * padded(shape.k_dim)], v: vec![0.0; PAGE * padded(shape.v_dim)] },
            fold: Folds {
                running: vec![Running::EMPTY; queries],
                keep: vec![0.0; queries],
                weights: vec![0.0; queries * PAGE],
                acc: vec![0.0; queries * shape.v_dim],
                all: vec![Running::EMPTY; queries],
                all_acc: vec![0.0; queries * shape.v_dim],
            },
            runs: Vec::with_capacity(PAGE),
        }
    }
}

impl Folds {
    /// Before the first range.
    pub(super) fn begin(&mut self) {
        self.all.fill(Running::EMPTY);
        self.all_acc.fill(0.0);
    }

    /// Before each range.
    pub(super) fn begin_range(&mut self) {
        self.running.fill(Running::EMPTY);
        self.acc.fill(0.0);
    }

    /// After each range, for queries that see some of it.
    pub(super) fn end_range(&mut self, kernels: &Kernels, queries: Range<usize>, v_dim: usize) {
        let values = queries.start * v_dim..queries.end * v_dim;
        let acc = self.acc[values.clone()].chunks_exact(v_dim);
        let all_acc = self.all_acc[values].chunks_exact_mut(v_dim);
        let running = self.running[queries.clone()].iter().zip(&mut self.all[queries]);
        for ((acc, all_acc), (range, all)) in acc.zip(all_acc).zip(running) {
            all.merge(kernels, *range, acc, all_acc);
        }
    }

    /// After the last one, the output of some queries, `[queries, v_dim]`.
    pub(super) fn end(&mut self, queries: Range<usize>, v_dim: usize) -> &[f32] {
        let acc = &mut self.all_acc[queries.start * v_dim..queries.end * v_dim];
        for (out, all) in acc.chunks_exact_mut(v_dim).zip(&self.all[queries]) {
            out.iter_mut().for_each(|o| *o /= all.sum);
        }
        acc
    }

    /// Scores of some queries (`[queries, k_dim]`, the first of them `first`) with the keys that begin at row `at` of a tile.
    pub(super) fn score(
        &mut self,
        kernels: &Kernels,
        q: &[f32],
        first: usize,
        keys: Tile<'_>,
        at: usize,
        scale: f32,
    ) {
        let end = (first + q.len() / keys.dim()) * PAGE;
        // SAFETY: `Kernels` holds only what this machine can run.
        unsafe { (kernels.score)(q, keys, scale, PAGE, &mut self.weights[first * PAGE + at..end]) }
    }

    /// Turns the `count` scores of each of these queries into weights.
    pub(super) fn weigh(&mut self, kernels: &Kernels, queries: Range<usize>, count: usize) {
        for query in queries {
            let (running, weights) = (&mut self.running[query], &mut self.weights[query * PAGE..][..count]);
            // SAFETY: `Kernels` holds only what this machine can run.
            let max = unsafe { (kernels.max)(weights) };
            let max = if max > running.max { max } else { running.max };
            // SAFETY: as above.
            let sum = unsafe { (kernels.exp_and_sum)(weights, max) };
            let keep = crate::math::exp(running.max - max);
            *running = Running { max, sum: running.sum.mul_add(keep, sum) };
            self.keep[query] = keep;
        }
    }

    /// Adds the values that begin at row `at` of a tile to these queries' sums.
    pub(super) fn accumulate(
        &mut self,
        kernels: &Kernels,
        queries: Range<usize>,
        values: Tile<'_>,
        at: usize,
    ) {
        let acc = &mut self.acc[queries.start * values.dim()..queries.end * values.dim()];
        let weights = &self.weights[queries.start * PAGE + at..queries.end * PAGE];
        // SAFETY: as above.
        unsafe { (kernels.accumulate)(weights, PAGE, values, &self.keep[queries.clone()], acc) }
        // What is added next to the same tile's sums is added as they are.
        self.keep[queries].fill(1.0);
    }

    /// One step of the online softmax: the keys and values of one tile for the first queries, `[queries, k_dim]`.
    pub(super) fn fold(
        &mut self,
        kernels: &Kernels,
        q: &[f32],
        keys: Tile<'_>,
        values: Tile<'_>,
        scale: f32,
    ) {
        let queries = 0..q.len() / keys.dim();
        self.score(kernels, q, 0, keys, 0, scale);
        self.weigh(kernels, queries.clone(), keys.count());
        self.accumulate(kernels, queries, values, 0);
    }
}
