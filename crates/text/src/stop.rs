//! Stop strings, matched across the borders of the pieces that a stream delivers.
//!
//! In: pieces of text in order. Out: the text that certainly precedes any stop string. The result does
//! not depend on how the text was cut into pieces: the stop string that is complete first wins, and of
//! several that end at the same place the longest.

use crate::Error;

/// What became certain with a piece of text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StopOutcome {
    /// Text to show.
    pub emit: String,
    /// Index of the stop string that was found; everything from its first character on is dropped.
    pub stopped: Option<usize>,
}

/// Looks for stop strings in a stream of text.
#[derive(Clone, Debug)]
pub struct StopStrings {
    stops: Vec<String>,
    /// Text held back: the longest suffix so far that a stop string starts with.
    held: String,
    stopped: Option<usize>,
}

impl StopStrings {
    /// A matcher for these strings; none at all is fine, an empty one is refused.
    pub fn new(stops: impl IntoIterator<Item = String>) -> Result<StopStrings, Error> {
        let stops: Vec<String> = stops.into_iter().collect();
        match stops.iter().position(String::is_empty) {
            Some(index) => Err(Error::EmptyStop { index }),
            None => Ok(StopStrings { stops, held: String::new(), stopped: None }),
        }
    }

    /// Takes the next piece. After a stop nothing is emitted any more.
    pub fn push(&mut self, piece: &str) -> StopOutcome {
        if self.stopped.is_some() {
            return StopOutcome { emit: String::new(), stopped: self.stopped };
        }
        self.held.push_str(piece);
        if let Some((start, index)) = self.first_match() {
            self.stopped = Some(index);
            let mut emit = std::mem::take(&mut self.held);
            emit.truncate(start);
            return StopOutcome { emit, stopped: self.stopped };
        }
        let tail = self.held.split_off(self.certain());
        StopOutcome { emit: std::mem::replace(&mut self.held, tail), stopped: None }
    }

    /// The end of the stream: what was held back is ordinary text.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// Start and index of the stop string that ends first (the longest of several).
    fn first_match(&self) -> Option<(usize, usize)> {
        let found = self.stops.iter().enumerate().filter_map(|(index, stop)| {
            let start = self.held.find(stop.as_str())?;
            Some((start + stop.len(), start, index))
        });
        found.min().map(|(_, start, index)| (start, index))
    }

    /// Number of bytes that can no longer be part of a stop string.
    fn certain(&self) -> usize {
        let longest = self.stops.iter().map(String::len).max().unwrap_or(0);
        let first = self.held.len().saturating_sub(longest.saturating_sub(1));
        let starts = self.held.char_indices().map(|(at, _)| at).filter(|&at| at >= first);
        let may_start = |at: &usize| self.stops.iter().any(|stop| stop.starts_with(&self.held[*at..]));
        starts.into_iter().find(may_start).unwrap_or(self.held.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn run<'a>(stops: &[&str], pieces: impl IntoIterator<Item = &'a str>) -> (String, Option<usize>) {
        let mut matcher = StopStrings::new(stops.iter().map(|s| s.to_string())).unwrap();
        let mut text = String::new();
        let mut stopped = None;
        for piece in pieces {
            let outcome = matcher.push(piece);
            text += &outcome.emit;
            stopped = outcome.stopped;
        }
        (text + &matcher.finish(), stopped)
    }

    #[test]
    fn a_stop_string_is_found_across_borders() {
        assert_eq!(run(&["</end>"], ["a<", "/en", "d>b", "c"]), ("a".into(), Some(0)));
        assert_eq!(run(&["</end>"], ["a<", "/en", "x"]), ("a</enx".into(), None));
        assert_eq!(run(&["aab"], ["aa", "ab"]), ("a".into(), Some(0)));
        assert_eq!(run(&["ende", "日本"], ["x日", "本y"]), ("x".into(), Some(1)));
    }

    #[test]
    fn only_what_may_become_a_stop_string_is_held_back() {
        let mut matcher = StopStrings::new(["STOP".to_owned()]).unwrap();
        assert_eq!(matcher.push("go ST").emit, "go ");
        assert_eq!(matcher.push("ART").emit, "START");
        assert_eq!(matcher.push("é ").emit, "é ");
    }

    #[test]
    fn an_empty_stop_string_is_refused() {
        let stops = ["a".to_owned(), String::new()];
        assert!(matches!(StopStrings::new(stops), Err(Error::EmptyStop { index: 1 })));
    }

    proptest! {
        /// Reference: the same text pushed at once, and a direct search for the first complete stop string.
        #[test]
        fn the_cut_does_not_matter(pieces in prop::collection::vec("[abé]{0,4}", 0..8),
                                   stops in prop::collection::vec("[abé]{1,4}", 0..4)) {
            let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
            let whole = pieces.concat();
            let cut = run(&stops, pieces.iter().map(String::as_str));
            prop_assert_eq!(&cut, &run(&stops, [whole.as_str()]));
            let expected = (0..=whole.len()).filter(|&end| whole.is_char_boundary(end)).find_map(|end| {
                let ending = stops.iter().filter(|s| whole[..end].ends_with(**s));
                ending.map(|s| end - s.len()).min()
            });
            prop_assert_eq!(cut.1.is_some(), expected.is_some());
            prop_assert_eq!(&cut.0, &whole[..expected.unwrap_or(whole.len())]);
        }
    }
}
