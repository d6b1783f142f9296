//! Frequencies of rotary position embedding, with the scalings that extend a model's context.

use minfer_format::Metadata;
use minfer_graph::RopeTable;
use serde_json::Value as Json;

use crate::checkpoint::Checkpoint;
use crate::error::ModelError;

/// How frequencies are changed for longer contexts.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Scaling {
    None,
    /// All frequencies divided by a factor (position interpolation, Chen et al. 2023).
    Linear {
        factor: f32,
    },
    /// Low frequencies divided by `factor`, high ones kept, a ramp between (Llama 3.1).
    Llama3 {
        factor: f32,
        low_freq_factor: f32,
        high_freq_factor: f32,
        original_context: f32,
    },
    /// Frequencies that turn less than `beta_slow` times in the original context are divided by `factor`, those
    /// that turn more than `beta_fast` times are kept, a ramp between (YaRN, Peng et al. 2023). The factor on
    /// cosines and sines that goes with it stays 1.
    Yarn {
        factor: f32,
        beta_fast: f32,
        beta_slow: f32,
        original_context: f32,
    },
    /// Divisors per pair, as GGUF files of Llama 3 carry them (`rope_freqs.weight`).
    Divisors(Vec<f32>),
}

/// `theta^(-2i/dims)` for each pair, scaled; the arithmetic is f32 as in transformers.
pub(crate) fn table(theta: f32, dims: usize, scaling: &Scaling) -> RopeTable {
    let inv_freq = (0..dims / 2).map(|i| 1.0 / theta.powf((2 * i) as f32 / dims as f32));
    let scaled = inv_freq.enumerate().map(|(i, f)| match scaling {
        Scaling::None => f,
        Scaling::Linear { factor } => f / factor,
        Scaling::Divisors(d) => f / d.get(i).copied().unwrap_or(1.0),
        &Scaling::Yarn { factor, beta_fast, beta_slow, original_context } => {
            // The pair that turns `beta` times, as a fraction.
            let pair = |beta: f32| {
                let turns = (original_context / (beta * 2.0 * std::f32::consts::PI)).ln();
                dims as f32 * turns / (2.0 * theta.ln())
            };
            let last = dims.saturating_sub(1) as f32;
            let low = pair(beta_fast).floor().clamp(0.0, last);
            let high = pair(beta_slow).ceil().clamp(0.0, last);
            let stretched = ((i as f32 - low) / (high - low).max(0.001)).clamp(0.0, 1.0);
            f / factor * stretched + f * (1.0 - stretched)
        }
        &Scaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
            llama3(f, factor, low_freq_factor, high_freq_factor, original_context)
        }
    });
    RopeTable { inv_freq: scaled.collect(), attention_factor: 1.0 }
}

fn llama3(f: f32, factor: f32, low: f32, high: f32, context: f32) -> f32 {
    let wavelength = 2.0 * std::f32::consts::PI / f;
    if wavelength > context / low {
        return f / factor;
    }
    if wavelength < context / high {
        return f;
    }
    let smooth = (context / wavelength - low) / (high - low);
    (1.0 - smooth) * f / factor + smooth * f
}

fn unsupported(ck: &Checkpoint, kind: &str) -> ModelError {
    ModelError::RopeScaling { source_name: ck.name(), kind: kind.to_string() }
}

pub(crate) fn scaling_from_gguf(ck: &Checkpoint, m: &Metadata, arch: &str) -> Result<Scaling, ModelError> {
    let key = |suffix: &str| format!("{arch}.rope.scaling.{suffix}");
    let factor = m.opt_f32(&key("factor"))?.unwrap_or(0.0);
    match m.opt_string(&key("type"))?.unwrap_or("none") {
        "none" => Ok(Scaling::None),
        // llama.cpp writes 0 for "no factor".
        "linear" if factor == 0.0 || factor == 1.0 => Ok(Scaling::None),
        "linear" => positive(ck, "rope.scaling.factor", factor).map(|factor| Scaling::Linear { factor }),
        other => Err(unsupported(ck, other)),
    }
}

pub(crate) fn positive(ck: &Checkpoint, key: &str, x: f32) -> Result<f32, ModelError> {
    if x.is_finite() && x > 0.0 { Ok(x) } else { Err(ck.bad(key, format!("is {x}, not a positive number"))) }
}

/// Theta and scaling. transformers 5 nests both in `rope_parameters`; older files have `rope_theta` and
/// `rope_scaling` beside each other.
pub(crate) fn scaling_from_hf(ck: &Checkpoint, config: &Json) -> Result<(f32, Scaling), ModelError> {
    let nested =
        ["rope_parameters", "rope_scaling"].iter().find_map(|k| config.get(*k).filter(|v| v.is_object()));
    let empty = Json::Null;
    let rope = nested.unwrap_or(&empty);
    let number = |key: &str| rope.get(key).and_then(Json::as_f64).map(|x| x as f32);
    let theta = number("rope_theta").or(config.get("rope_theta").and_then(Json::as_f64).map(|x| x as f32));
    let need = |key: &str| match number(key) {
        Some(x) => positive(ck, &format!("config.json: rope {key}"), x),
        None => Err(ck.bad(&format!("config.json: rope {key}"), "is missing")),
    };
    let kind = rope.get("rope_type").or(rope.get("type")).and_then(Json::as_str).unwrap_or("default");
    let scaling = match kind {
        "default" => Scaling::None,
        "linear" => Scaling::Linear { factor: need("factor")? },
        "llama3" => Scaling::Llama3 {
            factor: need("factor")?,
            low_freq_factor: need("low_freq_factor")?,
            high_freq_factor: need("high_freq_factor")?,
            original_context: need("original_max_position_embeddings")?,
        },
        other => return Err(unsupported(ck, other)),
    };
    Ok((theta.unwrap_or(10_000.0), scaling))
}

/// Share of each head's dimensions that is rotated.
pub(crate) fn rotated_fraction(config: &Json) -> f64 {
    let nested = config.get("rope_parameters").and_then(|r| r.get(FRACTION));
    nested.or(config.get(FRACTION)).and_then(Json::as_f64).unwrap_or(1.0)
}

const FRACTION: &str = "partial_rotary_factor";

#[cfg(test)]
mod tests {
    use super::*;

    /// DeepSeek V4's published parameters: pairs up to 15 turn more than 32 times in 65536 positions, the last ones
    /// (from 25 on) less than once. Reference: those bounds in f64; relative tolerance 1e-5.
    #[test]
    fn yarn_bands() {
        let theta = 160_000.0;
        let (beta_fast, beta_slow, original_context) = (32.0, 1.0, 65536.0);
        let table = table(theta, 64, &Scaling::Yarn { factor: 16.0, beta_fast, beta_slow, original_context });
        for (i, &got) in table.inv_freq.iter().enumerate() {
            let f = f64::from(theta).powf(-(2.0 * i as f64) / 64.0);
            let ramp = ((i as f64 - 15.0) / 10.0).clamp(0.0, 1.0);
            let want = f * (1.0 - ramp) + f / 16.0 * ramp;
            assert!((f64::from(got) - want).abs() <= 1e-5 * want, "pair {i}: {got} vs {want}");
        }
        let turns = |i: f64| 65536.0 / (2.0 * std::f64::consts::PI) * f64::from(theta).powf(-i / 32.0);
        assert!(turns(15.0) > 32.0 && turns(16.0) < 32.0 && turns(24.0) > 1.0 && turns(25.0) < 1.0);
    }

    /// Reference: the formula in f64 for Llama 3.1's published parameters; relative tolerance 1e-5.
    #[test]
    fn llama3_bands() {
        let scaling = Scaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_context: 8192.0,
        };
        let table = table(500_000.0, 128, &scaling);
        for (i, &got) in table.inv_freq.iter().enumerate() {
            let f = 500_000f64.powf(-(2.0 * i as f64) / 128.0);
            let wavelength = 2.0 * std::f64::consts::PI / f;
            let want = if wavelength < 8192.0 / 4.0 {
                f
            } else if wavelength > 8192.0 {
                f / 8.0
            } else {
                let s = (8192.0 / wavelength - 1.0) / 3.0;
                (1.0 - s) * f / 8.0 + s * f
            };
            assert!((f64::from(got) - want).abs() <= 1e-5 * want, "pair {i}: {got} vs {want}");
        }
    }
}
