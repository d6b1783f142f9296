//! The delta rule over chunks of tokens (Yang et al. 2024, section 3), for devices that prefer matrix
//! products. A definition to test against, not a kernel: on the CPU, tokens go one by one.
//!
//! With `G` the running sum of log-decays in a chunk, one number per token or one per token and key channel `c`, and
//! matrices of a chunk in capitals:
//!
//! ```text
//! A_ij = beta_i sum_c K_ic K_jc e^(G_ic - G_jc) for j < i;  T = (I + A)^-1
//! U = T (beta V);  W = T (beta K e^G);  V' = U - W S
//! B_ij = sum_c Q_ic K_jc e^(G_ic - G_jc) for j <= i;  O = (Q e^G) S + B V'
//! S = e^(G_last) S + (K e^(G_last - G))^T V'
//! ```
//!
//! Decays enter as exponentials of differences: `e^G` of a whole chunk underflows, `e^-G` overflows.

/// Tokens of one value head: unit keys, scaled unit queries, log-decays, rates.
#[derive(Clone, Copy, Debug)]
pub struct Tokens<'a> {
    /// `[tokens, k_dim]`.
    pub q: &'a [f32],
    /// `[tokens, k_dim]`.
    pub k: &'a [f32],
    /// `[tokens, v_dim]`.
    pub v: &'a [f32],
    /// `[tokens]` or `[tokens, k_dim]`, at most 0.
    pub log_decay: &'a [f32],
    /// `[tokens]`.
    pub beta: &'a [f32],
}

/// Changes `state` (`[k_dim, v_dim]`) by all tokens and returns `[tokens, v_dim]`, `chunk` tokens at a time.
///
/// # Panics
/// When the lengths do not fit.
pub fn run(t: &Tokens<'_>, k_dim: usize, v_dim: usize, chunk: usize, state: &mut [f32]) -> Vec<f32> {
    let count = t.beta.len();
    assert!(k_dim > 0 && v_dim > 0 && chunk > 0 && state.len() == k_dim * v_dim, "chunked: sizes");
    let decays = t.log_decay.len() / count.max(1);
    assert!([1, k_dim].contains(&decays) || count == 0, "chunked: decays");
    let mut out = Vec::with_capacity(count * v_dim);
    for from in (0..count).step_by(chunk) {
        let to = (from + chunk).min(count);
        let part = Tokens {
            q: &t.q[from * k_dim..to * k_dim],
            k: &t.k[from * k_dim..to * k_dim],
            v: &t.v[from * v_dim..to * v_dim],
            log_decay: &t.log_decay[from * decays..to * decays],
            beta: &t.beta[from..to],
        };
        out.extend(one_chunk(&part, k_dim, v_dim, state));
    }
    out
}

/// `sum_i x[i] * rows[i][e]`.
fn weighted(x: impl Iterator<Item = f32>, rows: &[f32], width: usize, e: usize) -> f32 {
    x.zip(rows.chunks_exact(width)).map(|(x, row)| x * row[e]).sum()
}

/// One chunk with its running sums of log-decays, `[tokens, k_dim]`.
struct Chunk<'a> {
    t: &'a Tokens<'a>,
    k_dim: usize,
    total: Vec<f32>,
}

impl Chunk<'_> {
    /// Row `i` of `x` as it meets the state from before the chunk: `x_i e^G_i`.
    fn decayed(&self, x: &[f32], i: usize) -> impl Iterator<Item = f32> {
        (0..self.k_dim).map(move |c| x[i * self.k_dim + c] * self.total[i * self.k_dim + c].exp())
    }

    /// How row `i` of `x` meets key `j`: `sum_c x_ic K_jc e^(G_ic - G_jc)`.
    fn overlap(&self, x: &[f32], i: usize, j: usize) -> f32 {
        let (i, j) = (i * self.k_dim, j * self.k_dim);
        (0..self.k_dim)
            .map(|c| x[i + c] * self.t.k[j + c] * (self.total[i + c] - self.total[j + c]).exp())
            .sum()
    }
}

fn one_chunk(t: &Tokens<'_>, k_dim: usize, v_dim: usize, state: &mut [f32]) -> Vec<f32> {
    let n = t.beta.len();
    let chunk = Chunk { t, k_dim, total: running_sums(t.log_decay, n, k_dim) };
    // Forward substitution with I + A, on `beta V - beta K e^G S` at once: V' = T (beta V - beta K e^G S).
    let mut fresh: Vec<f32> = Vec::with_capacity(n * v_dim);
    for i in 0..n {
        let row: Vec<f32> = (0..v_dim)
            .map(|e| {
                let seen = weighted(chunk.decayed(t.k, i), state, v_dim, e);
                let earlier = weighted((0..i).map(|j| chunk.overlap(t.k, i, j)), &fresh, v_dim, e);
                t.beta[i] * (t.v[i * v_dim + e] - seen - earlier)
            })
            .collect();
        fresh.extend(row);
    }
    let mut out = Vec::with_capacity(n * v_dim);
    for i in 0..n {
        for e in 0..v_dim {
            let before = weighted(chunk.decayed(t.q, i), state, v_dim, e);
            let within = weighted((0..=i).map(|j| chunk.overlap(t.q, i, j)), &fresh, v_dim, e);
            out.push(before + within);
        }
    }
    for (c, row) in state.chunks_exact_mut(v_dim).enumerate() {
        let total = |j: usize| chunk.total[j * k_dim + c];
        for (e, s) in row.iter_mut().enumerate() {
            let keys = (0..n).map(|j| t.k[j * k_dim + c] * (total(n - 1) - total(j)).exp());
            *s = total(n - 1).exp() * *s + weighted(keys, &fresh, v_dim, e);
        }
    }
    out
}

/// `[n, k_dim]` from `n` log-decays or `n * k_dim` of them.
fn running_sums(log_decay: &[f32], n: usize, k_dim: usize) -> Vec<f32> {
    let (mut sums, each) = (vec![0.0; n * k_dim], log_decay.len() / n.max(1));
    for i in 0..n * k_dim {
        let before = i.checked_sub(k_dim).map_or(0.0, |i| sums[i]);
        sums[i] = before + log_decay[i / k_dim * each + i % k_dim % each];
    }
    sums
}
