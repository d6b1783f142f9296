//! The stages. Those that change logits in place come first in any sensible order, since they need the
//! whole vocabulary; the others work on candidates sorted by logit.

use std::cmp::Ordering;
use std::collections::HashMap;

use super::Penalties;

/// Index of the largest number, lowest among equals; `None` when there is none.
pub(super) fn greedy(logits: &[f32]) -> Option<u32> {
    let mut best: Option<(usize, f32)> = None;
    for (i, &x) in logits.iter().enumerate() {
        if !x.is_nan() && best.is_none_or(|(_, b)| x > b) {
            best = Some((i, x));
        }
    }
    best.map(|(i, _)| i as u32)
}

pub(super) fn logit_bias(logits: &mut [f32], bias: &[(u32, f32)]) {
    for &(id, b) in bias {
        if let Some(x) = logits.get_mut(id as usize) {
            *x += b;
        }
    }
}

pub(super) fn penalties(logits: &mut [f32], p: &Penalties, history: &[u32]) {
    if p.repeat == 1.0 && p.frequency == 0.0 && p.presence == 0.0 {
        return;
    }
    let mut counts: HashMap<u32, u32> = HashMap::new();
    for &id in &history[history.len().saturating_sub(p.window)..] {
        *counts.entry(id).or_default() += 1;
    }
    for (id, count) in counts {
        if let Some(x) = logits.get_mut(id as usize) {
            *x = if *x > 0.0 { *x / p.repeat } else { *x * p.repeat };
            *x -= count as f32 * p.frequency + p.presence;
        }
    }
}

/// Tokens still in the running. Either all, unsorted, or fewer, best first.
pub(super) struct Candidates {
    list: Vec<(u32, f32)>,
    logits: Vec<f32>,
    sorted: bool,
}

fn better(a: &(u32, f32), b: &(u32, f32)) -> Ordering {
    b.1.total_cmp(&a.1).then(a.0.cmp(&b.0))
}

impl Candidates {
    pub(super) fn new(logits: Vec<f32>) -> Candidates {
        Candidates { list: Vec::new(), logits, sorted: false }
    }

    /// Changes logits of the whole vocabulary. After a stage has narrowed it, the survivors' are changed.
    pub(super) fn on_logits(&mut self, change: impl FnOnce(&mut [f32])) {
        for &(id, x) in &self.list {
            self.logits[id as usize] = x;
        }
        change(&mut self.logits);
        for c in &mut self.list {
            c.1 = self.logits[c.0 as usize];
        }
        self.sorted = false;
    }

    fn fill(&mut self) {
        if self.list.is_empty() {
            let numbers = self.logits.iter().enumerate().filter(|(_, x)| !x.is_nan());
            self.list = numbers.map(|(i, &x)| (i as u32, x)).collect();
            self.sorted = false;
        }
    }

    fn sort(&mut self) {
        self.fill();
        if !self.sorted {
            self.list.sort_unstable_by(better);
            self.sorted = true;
        }
    }

    pub(super) fn top_k(&mut self, k: usize) {
        self.fill();
        if k == 0 || k >= self.list.len() {
            return;
        }
        if !self.sorted {
            self.list.select_nth_unstable_by(k - 1, better);
        }
        self.list.truncate(k);
        self.sort();
    }

    /// Probabilities relative to the best one's, best first.
    fn weights(&self) -> impl Iterator<Item = f64> {
        let max = self.list.first().map_or(0.0, |c| f64::from(c.1));
        // An infinite maximum would make every difference NaN: only equals of it have a chance.
        self.list.iter().map(move |c| if f64::from(c.1) == max { 1.0 } else { (f64::from(c.1) - max).exp() })
    }

    pub(super) fn top_p(&mut self, p: f32) {
        if p >= 1.0 {
            return;
        }
        self.sort();
        let wanted = self.weights().sum::<f64>() * f64::from(p);
        let mut sum = 0.0;
        let keep = self.weights().take_while(|w| {
            let more = sum < wanted;
            sum += w;
            more
        });
        let keep = keep.count().max(1);
        self.list.truncate(keep);
    }

    pub(super) fn min_p(&mut self, p: f32) {
        if p <= 0.0 {
            return;
        }
        self.sort();
        let keep = self.weights().take_while(|&w| w >= f64::from(p)).count().max(1);
        self.list.truncate(keep);
    }

    pub(super) fn temperature(&mut self, t: f32) {
        self.fill();
        self.list.iter_mut().for_each(|c| c.1 /= t);
    }

    /// The candidate at `uniform` (in [0, 1)) of the cumulated probabilities, best first.
    pub(super) fn draw(mut self, uniform: f64) -> Option<u32> {
        self.sort();
        let target = self.weights().sum::<f64>() * uniform;
        let mut sum = 0.0;
        let chosen = self.weights().position(|w| {
            sum += w;
            sum > target
        });
        // Rounding may leave the sum a hair below the target: then it is the last one.
        let index = chosen.or(self.list.len().checked_sub(1))?;
        Some(self.list[index].0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn greedy_takes_the_lowest_of_equals_and_skips_nan() {
        assert_eq!(greedy(&[f32::NAN, 1.0, 3.0, 3.0]), Some(2));
        assert_eq!(greedy(&[f32::NEG_INFINITY]), Some(0));
        assert_eq!(greedy(&[f32::NAN]), None);
    }

    #[test]
    fn penalties_follow_their_formulas() {
        let mut logits = vec![2.0, -2.0, 1.0, 5.0];
        let p = Penalties { window: 3, repeat: 2.0, frequency: 0.25, presence: 0.5 };
        penalties(&mut logits, &p, &[3, 0, 1, 0]);
        assert_eq!(logits, [1.0 - 0.5 - 0.5, -4.0 - 0.25 - 0.5, 1.0, 5.0]);
    }

    #[test]
    fn narrowing() {
        let logits: Vec<f32> = [0.5f32, 0.3, 0.15, 0.05].iter().map(|p| p.ln()).collect();
        let left = |narrow: fn(&mut Candidates)| {
            let mut c = Candidates::new(logits.clone());
            narrow(&mut c);
            c.sort();
            c.list.iter().map(|c| c.0).collect::<Vec<_>>()
        };
        assert_eq!(left(|c| c.top_k(2)), [0, 1]);
        assert_eq!(left(|c| c.top_k(0)), [0, 1, 2, 3]);
        assert_eq!(left(|c| c.top_p(0.7)), [0, 1]);
        assert_eq!(left(|c| c.top_p(0.81)), [0, 1, 2]);
        assert_eq!(left(|c| c.min_p(0.29)), [0, 1, 2]);
        assert_eq!(left(|c| c.min_p(0.31)), [0, 1]);
        assert_eq!(left(|c| c.top_p(1e-9)), [0]);
    }

    #[test]
    fn draws_follow_the_cumulated_probabilities() {
        let logits: Vec<f32> = [0.25f32, 0.5, 0.25].iter().map(|p| p.ln()).collect();
        let draw = |u| Candidates::new(logits.clone()).draw(u);
        assert_eq!((draw(0.0), draw(0.49), draw(0.51), draw(0.99)), (Some(1), Some(1), Some(0), Some(2)));
        assert_eq!(Candidates::new(vec![f32::NAN]).draw(0.5), None);
        assert_eq!(Candidates::new(vec![f32::INFINITY, 0.0]).draw(0.9), Some(0));
    }
}
