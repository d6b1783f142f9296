//! The delta rule over chunks of tokens (Yang et al. 2024, section 3), for devices that prefer matrix
//! products. A definition to test against, not a kernel: on the CPU, tokens go one by one.
//!
//! With `G` the running sum of log-decays in a chunk, and matrices of a chunk in capitals:
//!
//! ```text
//! A = strictly_lower((beta K) K^T * e^(G_i - G_j));  T = (I + A)^-1
//! U = T (beta V);  W = T (beta K e^G);  V' = U - W S
//! O = (Q e^G) S + lower(Q K^T * e^(G_i - G_j)) V'
//! S = e^(G_last) S + (K e^(G_last - G))^T V'
//! ```

/// Tokens of one value head: unit keys, scaled unit queries, log-decays, rates.
#[derive(Clone, Copy, Debug)]
pub struct Tokens<'a> {
    /// `[tokens, k_dim]`.
    pub q: &'a [f32],
    /// `[tokens, k_dim]`.
    pub k: &'a [f32],
    /// `[tokens, v_dim]`.
    pub v: &'a [f32],
    /// `[tokens]`, at most 0.
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
    let mut out = Vec::with_capacity(count * v_dim);
    for from in (0..count).step_by(chunk) {
        let to = (from + chunk).min(count);
        let part = Tokens {
            q: &t.q[from * k_dim..to * k_dim],
            k: &t.k[from * k_dim..to * k_dim],
            v: &t.v[from * v_dim..to * v_dim],
            log_decay: &t.log_decay[from..to],
            beta: &t.beta[from..to],
        };
        out.extend(one_chunk(&part, k_dim, v_dim, state));
    }
    out
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// `sum_i x[i] * rows[i][e]`.
fn weighted(x: impl Iterator<Item = f32>, rows: &[f32], width: usize, e: usize) -> f32 {
    x.zip(rows.chunks_exact(width)).map(|(x, row)| x * row[e]).sum()
}

fn one_chunk(t: &Tokens<'_>, k_dim: usize, v_dim: usize, state: &mut [f32]) -> Vec<f32> {
    let total = running_sum(t.log_decay);
    let (n, last) = (total.len(), total[total.len() - 1]);
    let (key, query) = (|i: usize| &t.k[i * k_dim..][..k_dim], |i: usize| &t.q[i * k_dim..][..k_dim]);
    let decay = |i: usize, j: usize| (total[i] - total[j]).exp();
    // Forward substitution with I + A, on `beta V - beta K e^G S` at once: V' = T (beta V - beta K e^G S).
    let mut fresh: Vec<f32> = Vec::with_capacity(n * v_dim);
    for (i, since) in total.iter().enumerate() {
        let row: Vec<f32> = (0..v_dim)
            .map(|e| {
                let seen = since.exp() * weighted(key(i).iter().copied(), state, v_dim, e);
                let overlap = (0..i).map(|j| dot(key(i), key(j)) * decay(i, j));
                t.beta[i] * (t.v[i * v_dim + e] - seen - weighted(overlap, &fresh, v_dim, e))
            })
            .collect();
        fresh.extend(row);
    }
    let mut out = Vec::with_capacity(n * v_dim);
    for (i, since) in total.iter().enumerate() {
        for e in 0..v_dim {
            let before = since.exp() * weighted(query(i).iter().copied(), state, v_dim, e);
            let overlap = (0..=i).map(|j| dot(query(i), key(j)) * decay(i, j));
            out.push(before + weighted(overlap, &fresh, v_dim, e));
        }
    }
    for (i, row) in state.chunks_exact_mut(v_dim).enumerate() {
        for (e, s) in row.iter_mut().enumerate() {
            let keys = (0..n).map(|j| key(j)[i] * (last - total[j]).exp());
            *s = last.exp() * *s + weighted(keys, &fresh, v_dim, e);
        }
    }
    out
}

fn running_sum(x: &[f32]) -> Vec<f32> {
    let mut sum = 0.0;
    let next = |x: &f32| {
        sum += x;
        sum
    };
    x.iter().map(next).collect()
}
