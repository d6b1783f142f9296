//! `--speculate`: its form, what it comes to with a given model, and how drafts fared as people read it.
//!
//! In: the flag's text and whether the model has a draft head. Out: the engine's [`Speculate`]. Drafting and
//! verifying are the engine's.

use minfer_engine::{Acceptance, Checkpoint, Speculate};
use minfer_model::{DraftHead, Model, ModelError};

use crate::error::Failure;

/// What was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Speculation {
    Off,
    /// Where the model and the way of decoding allow it.
    Auto,
    /// With the model's draft head, or not at all; `None`: as far as suits the head.
    Head {
        depth: Option<usize>,
    },
}

/// Tokens ahead of a chain when no depth is typed. Each further draft is kept less often and costs as much.
const CHAIN_DEPTH: usize = 2;

impl Speculation {
    /// Reads `off`, `auto`, `mtp` or `mtp:DEPTH`.
    pub(crate) fn parse(text: &str) -> Result<Speculation, String> {
        let most = Speculate::MAX_DEPTH;
        let wrong = || format!("must be off, auto, mtp or mtp:DEPTH with a depth of 1 to {most}");
        match text.split_once(':') {
            None if text == "off" => Ok(Speculation::Off),
            None if text == "auto" => Ok(Speculation::Auto),
            None if text == "mtp" => Ok(Speculation::Head { depth: None }),
            Some(("mtp", depth)) => match depth.parse() {
                Ok(depth) if (1..=most).contains(&depth) => Ok(Speculation::Head { depth: Some(depth) }),
                _ => Err(wrong()),
            },
            _ => Err(wrong()),
        }
    }

    /// What this comes to. The model is asked for its head only where the answer matters.
    pub(crate) fn choose(
        self,
        greedy: bool,
        model: &dyn Model,
        checkpoint: &Checkpoint,
    ) -> Result<Choice, Failure> {
        match self {
            Speculation::Off => Ok(Choice::Off),
            Speculation::Auto if !greedy => Ok(Choice::OffBecause("decoding is not greedy (--temp 0)")),
            Speculation::Auto => Ok(match suits(model, checkpoint)? {
                Some(depth) => Choice::Head { depth },
                None => Choice::OffBecause("the model has no draft head"),
            }),
            Speculation::Head { depth } => match suits(model, checkpoint)? {
                Some(suits) => Ok(Choice::Head { depth: depth.unwrap_or(suits) }),
                None => Err(Failure::NoDraftHead),
            },
        }
    }
}

/// What is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Choice {
    Off,
    /// `auto` found a reason against it.
    OffBecause(&'static str),
    Head {
        depth: usize,
    },
}

impl Choice {
    /// Tokens ahead; `None`: off.
    pub(crate) fn depth(self) -> Option<usize> {
        match self {
            Choice::Head { depth } => Some(depth),
            Choice::Off | Choice::OffBecause(_) => None,
        }
    }

    pub(crate) fn for_engine(self) -> Speculate {
        self.depth().map_or(Speculate::Off, |depth| Speculate::Head { depth })
    }
}

/// A draft head in a file of its own is named to be used.
pub(crate) fn check_head_file(named: bool, speculation: Speculation) -> Result<(), Failure> {
    if named && speculation == Speculation::Off {
        let why =
            "--draft-head names a draft head that nothing uses: add --speculate auto or mtp, or leave it out";
        return Err(Failure::Usage(why.to_string()));
    }
    Ok(())
}

/// Tokens ahead that suit the checkpoint's draft head, if it has one: all of a block, which costs the same for one.
fn suits(model: &dyn Model, checkpoint: &Checkpoint) -> Result<Option<usize>, ModelError> {
    Ok(model.draft_head(checkpoint, 1)?.map(|head| match head {
        DraftHead::Chain(_) => CHAIN_DEPTH,
        DraftHead::Block(head) => head.size.min(Speculate::MAX_DEPTH),
    }))
}

/// The share of drafts kept at each depth, first draft first: `0.83 of 120, 0.69 of 120`.
pub(crate) fn kept(acceptance: &Acceptance) -> String {
    let pairs = acceptance.drafted.iter().zip(&acceptance.accepted).filter(|(drafted, _)| **drafted > 0);
    let shares = pairs.map(|(&made, &kept)| format!("{:.2} of {made}", kept as f64 / made as f64));
    let shares: Vec<String> = shares.collect();
    if shares.is_empty() { "none were made".to_string() } else { shares.join(", ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forms() {
        assert_eq!(Speculation::parse("off"), Ok(Speculation::Off));
        assert_eq!(Speculation::parse("auto"), Ok(Speculation::Auto));
        assert_eq!(Speculation::parse("mtp"), Ok(Speculation::Head { depth: None }));
        assert_eq!(Speculation::parse("mtp:1"), Ok(Speculation::Head { depth: Some(1) }));
        assert_eq!(Speculation::parse("mtp:7"), Ok(Speculation::Head { depth: Some(7) }));
        for wrong in ["", "on", "mtp:", "mtp:0", "mtp:8", "mtp:-1", "mtp:x", "auto:2", "off:1", "MTP"] {
            let error = Speculation::parse(wrong).unwrap_err();
            assert_eq!(error, "must be off, auto, mtp or mtp:DEPTH with a depth of 1 to 7", "{wrong}");
        }
    }

    #[test]
    fn shares() {
        let acceptance = Acceptance { drafted: vec![120, 119, 0], accepted: vec![100, 30, 0] };
        assert_eq!(kept(&acceptance), "0.83 of 120, 0.25 of 119");
        assert_eq!(kept(&Acceptance::default()), "none were made");
    }
}
