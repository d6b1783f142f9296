//! Against the formula in f64, the chunked form, and every instruction set.

use super::*;
use crate::math::exp;
use crate::testing::{Rng, assert_close, assert_same_bits};

/// Tokens of one head with log-decays and rates as models have them.
struct Sample {
    k_dim: usize,
    v_dim: usize,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    /// One per token, or one per token and key channel.
    log_decay: Vec<f32>,
    beta: Vec<f32>,
    state: Vec<f32>,
}

impl Sample {
    fn new(seed: u64, tokens: usize, k_dim: usize, v_dim: usize) -> Sample {
        Sample::with_decays(seed, tokens, [k_dim, v_dim], 1)
    }

    /// With a decay for each key channel, as far apart as a bound of -5 lets them be.
    fn per_channel(seed: u64, tokens: usize, k_dim: usize, v_dim: usize) -> Sample {
        let mut sample = Sample::with_decays(seed, tokens, [k_dim, v_dim], k_dim);
        sample.log_decay.iter_mut().for_each(|g| *g *= 5.0);
        sample
    }

    fn with_decays(seed: u64, tokens: usize, [k_dim, v_dim]: [usize; 2], decays: usize) -> Sample {
        let mut rng = Rng::new(seed);
        let mut units = |scale: f32| {
            let mut out = vec![0.0; tokens * k_dim];
            for out in out.chunks_mut(k_dim) {
                Kernels::scalar().unit(&rng.floats(k_dim, 2.0), scale, out);
            }
            out
        };
        let (q, k) = (units(1.0 / (k_dim as f32).sqrt()), units(1.0));
        Sample {
            k_dim,
            v_dim,
            q,
            k,
            v: rng.floats(tokens * v_dim, 2.0),
            log_decay: (0..tokens * decays).map(|_| -rng.float(1.0).abs()).collect(),
            beta: (0..tokens).map(|_| rng.float(1.0).abs()).collect(),
            state: rng.floats(k_dim * v_dim, 1.0),
        }
    }

    /// Outputs, then the state.
    fn run(&self, kernels: &Kernels) -> Vec<f32> {
        let (mut state, mut out) = (self.state.clone(), vec![0.0; self.v.len()]);
        for (t, out) in out.chunks_mut(self.v_dim).enumerate() {
            let decays = self.log_decay.len() / self.beta.len();
            let log_decay = &self.log_decay[t * decays..][..decays];
            let mut channels = vec![0.0; decays];
            kernels.exps(log_decay, &mut channels);
            let decay = if decays == 1 { Decay::Head(exp(log_decay[0])) } else { Decay::Channels(&channels) };
            let token = Token {
                q: &self.q[t * self.k_dim..][..self.k_dim],
                k: &self.k[t * self.k_dim..][..self.k_dim],
                v: &self.v[t * self.v_dim..][..self.v_dim],
                decay,
                beta: self.beta[t],
            };
            kernels.delta_step(&mut state, &token, out);
        }
        [out, state].concat()
    }

    fn reference(&self) -> Vec<f64> {
        let mut s: Vec<f64> = self.state.iter().map(|&x| f64::from(x)).collect();
        let mut out = Vec::new();
        for t in 0..self.beta.len() {
            let k = |i: usize| f64::from(self.k[t * self.k_dim + i]);
            let q = |i: usize| f64::from(self.q[t * self.k_dim + i]);
            let decays = self.log_decay.len() / self.beta.len();
            for (i, row) in s.chunks_mut(self.v_dim).enumerate() {
                let decay = f64::from(self.log_decay[t * decays + i % decays]).exp();
                row.iter_mut().for_each(|s| *s *= decay);
            }
            for e in 0..self.v_dim {
                let m: f64 = (0..self.k_dim).map(|i| k(i) * s[i * self.v_dim + e]).sum();
                let delta = f64::from(self.beta[t]) * (f64::from(self.v[t * self.v_dim + e]) - m);
                (0..self.k_dim).for_each(|i| s[i * self.v_dim + e] += k(i) * delta);
                out.push((0..self.k_dim).map(|i| q(i) * s[i * self.v_dim + e]).sum());
            }
        }
        [out, s].concat()
    }
}

/// Against f64: values and states of about 1 that decay; bound 1e-5 over 40 tokens.
#[test]
fn equals_the_formula() {
    for (k_dim, v_dim) in [(128, 128), (16, 16), (24, 83), (5, 3)] {
        for sample in [Sample::new(90, 40, k_dim, v_dim), Sample::per_channel(94, 40, k_dim, v_dim)] {
            assert_close(&sample.run(&Kernels::detect()), &sample.reference(), 1e-5);
        }
    }
}

#[test]
fn every_isa_gives_the_same_bits() {
    for (k_dim, v_dim) in [(128, 128), (32, 72), (7, 13), (1, 8), (16, 200)] {
        for sample in [Sample::new(91, 9, k_dim, v_dim), Sample::per_channel(95, 9, k_dim, v_dim)] {
            assert_same_bits(&sample.run(&Kernels::detect()), &sample.run(&Kernels::scalar()));
        }
    }
}

#[test]
fn equal_decays_of_all_channels_are_one_decay() {
    let one = Sample::new(96, 9, 24, 40);
    let each = one.log_decay.iter().flat_map(|g| [*g; 24]).collect();
    let channels = Sample { log_decay: each, ..Sample::new(96, 9, 24, 40) };
    assert_same_bits(&channels.run(&Kernels::detect()), &one.run(&Kernels::detect()));
}

/// Columns 40 to 71 of a state alone are those of the whole.
#[test]
fn columns_stand_alone() {
    let whole = Sample::new(93, 9, 24, 83);
    let cut = |x: &[f32]| x.chunks(83).flat_map(|row| &row[40..72]).copied().collect::<Vec<_>>();
    let part = Sample { v_dim: 32, v: cut(&whole.v), state: cut(&whole.state), ..Sample::new(93, 9, 24, 83) };
    assert_same_bits(&part.run(&Kernels::detect()), &cut(&whole.run(&Kernels::detect())));
}

/// The chunked form against token by token: 1e-4, for chunks that divide the tokens and that do not.
#[test]
fn the_chunked_form_is_the_same_function() {
    for sample in [Sample::new(92, 150, 16, 24), Sample::per_channel(97, 150, 16, 24)] {
        let want: Vec<f64> = sample.run(&Kernels::detect()).into_iter().map(f64::from).collect();
        for chunk in [1, 7, 50, 64, 1000] {
            let tokens = chunked::Tokens {
                q: &sample.q,
                k: &sample.k,
                v: &sample.v,
                log_decay: &sample.log_decay,
                beta: &sample.beta,
            };
            let mut state = sample.state.clone();
            let out = chunked::run(&tokens, 16, 24, chunk, &mut state);
            assert_close(&[out, state].concat(), &want, 1e-4);
        }
    }
}

#[test]
fn a_zero_row_has_no_direction_and_no_nan() {
    let mut out = [1.0; 4];
    Kernels::detect().unit(&[0.0; 4], 1.0, &mut out);
    assert_eq!(out, [0.0; 4]);
    // |x| = 5, and the constant under the root is below half a unit in the last place of 25.
    Kernels::detect().unit(&[3.0, 4.0, 0.0, 0.0], 1.0, &mut out);
    assert_close(&out, &[0.6, 0.8, 0.0, 0.0], 1e-7);
}
