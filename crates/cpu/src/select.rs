//! Choosing from a row of scores. Ties go to the lower index everywhere, so that a choice is a
//! function of the scores alone; NaN is never preferred to a number.

use crate::Kernels;

impl Kernels {
    /// Index of the largest number, the lowest among equals; 0 when no element is a number.
    pub fn argmax(&self, x: &[f32]) -> usize {
        // SAFETY: `Kernels` holds only what this machine can run.
        let max = unsafe { (self.max)(x) };
        x.iter().position(|&x| x == max).unwrap_or(0)
    }
}

/// Writes the indices of the `ids.len()` best scores and the scores themselves, best first.
///
/// NaN counts as `-inf`. One pass per rank: the best of those that come after the rank before.
///
/// # Panics
/// When more are asked for than there are, or `ids` and `best` differ in length.
pub fn top_k(scores: &[f32], ids: &mut [i32], best: &mut [f32]) {
    assert!(ids.len() <= scores.len() && ids.len() == best.len(), "top_k: lengths");
    let key = |i: usize| if scores[i].is_nan() { f32::NEG_INFINITY } else { scores[i] };
    let before = |a: usize, b: usize| key(a) > key(b) || (key(a) == key(b) && a < b);
    let mut previous = None;
    for (id, best) in ids.iter_mut().zip(best) {
        let left = (0..scores.len()).filter(|&i| previous.is_none_or(|p| before(p, i)));
        let chosen = left.reduce(|a, b| if before(b, a) { b } else { a }).unwrap_or(0);
        *id = chosen as i32;
        *best = scores[chosen];
        previous = Some(chosen);
    }
}

#[cfg(test)]
mod tests {
    use super::top_k;
    use crate::Kernels;
    use crate::testing::Rng;

    const NAN: f32 = f32::NAN;
    const INF: f32 = f32::INFINITY;

    #[test]
    fn argmax_takes_the_first_of_equals_and_never_nan() {
        let mut long = Rng::new(8).floats(1003, 1.0);
        long[417] = 5.0;
        long[900] = 5.0;
        long[3] = NAN;
        for k in [Kernels::scalar(), Kernels::detect()] {
            assert_eq!(k.argmax(&[]), 0);
            assert_eq!(k.argmax(&[1.0, 3.0, 3.0, NAN]), 1);
            assert_eq!(k.argmax(&[NAN; 19]), 0);
            assert_eq!(k.argmax(&[NAN, -INF, -INF]), 1);
            assert_eq!(k.argmax(&[NAN, -0.0, 0.0, INF]), 3);
            assert_eq!(k.argmax(&[-1.0, -0.0, 0.0]), 1);
            assert_eq!(k.argmax(&long), 417);
        }
    }

    /// Against a stable sort by descending score.
    #[test]
    fn top_k_equals_a_stable_sort() {
        let mut rng = Rng::new(9);
        for n in [1, 5, 64, 130] {
            // Few distinct values, so that ties are common.
            let scores: Vec<f32> = (0..n).map(|_| rng.below(9) as f32).collect();
            let mut order: Vec<i32> = (0..n as i32).collect();
            order.sort_by(|&a, &b| scores[b as usize].total_cmp(&scores[a as usize]));
            for k in [1, n.min(8), n] {
                let (mut ids, mut best) = (vec![-1; k], vec![0.0; k]);
                top_k(&scores, &mut ids, &mut best);
                assert_eq!(ids, order[..k]);
                assert!(ids.iter().zip(&best).all(|(&i, &b)| scores[i as usize] == b));
            }
        }
    }

    #[test]
    fn top_k_of_bad_scores_still_gives_distinct_indices() {
        let (mut ids, mut best) = ([0; 4], [0.0; 4]);
        top_k(&[NAN, 1.0, NAN, -INF], &mut ids, &mut best);
        assert_eq!(ids, [1, 0, 2, 3]);
    }
}
