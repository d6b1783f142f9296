//! Sessions and generation with the built-in model: answers, limits, stops, and what an error leaves behind.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::sync::atomic::Ordering;

use common::{cpu, open};
use minfer_cpu::Isa;
use minfer_engine::{
    Checkpoint, Chunk, Engine, EngineError, EngineOptions, Finish, Generate, Message, Outs, SamplerOptions,
    Text,
};

fn nano() -> Checkpoint {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/minfer-nano-Q8_0.gguf");
    Checkpoint::open(path.as_ref()).unwrap()
}

fn engine(model: &Checkpoint, context: usize) -> Engine {
    open(model, EngineOptions { context: Some(context), ..EngineOptions::new(cpu(2, Isa::detect())) })
}

/// All text of a generation, and why it ended.
fn answer(engine: &mut Engine, text: &Text, prompt: &[u32], options: &Generate) -> (String, Finish) {
    let mut session = engine.session();
    let mut generation = session.generate(text, prompt, options).unwrap();
    let mut out = String::new();
    while let Some(piece) = generation.next_piece().unwrap() {
        out.push_str(&piece.text);
    }
    (out, generation.finish().unwrap())
}

fn chat(text: &Text, question: &str) -> Vec<u32> {
    text.encode_chat(&[Message::new("user", question)]).unwrap()
}

/// Reference: the model's own README (`models/README.md`), greedy.
#[test]
fn answers_as_its_readme_says() {
    let model = nano();
    let text = Text::open(&model).unwrap();
    let mut engine = engine(&model, 256);
    for (question, want) in [
        ("What is 27 + 58?", "27 + 58 = 85."),
        ("Write this as a JSON list of strings: apple, pear, plum", r#"["apple", "pear", "plum"]"#),
        ("Sort these numbers from smallest to largest: 42, 7, 19, 3.", "3, 7, 19, 42"),
        ("What is the capital of France?", "The capital of France is Paris."),
    ] {
        let got = answer(&mut engine, &text, &chat(&text, question), &Generate::default());
        assert_eq!(got, (want.to_string(), Finish::EndToken), "{question}");
    }
}

#[test]
fn seeds_decide_draws() {
    let model = nano();
    let text = Text::open(&model).unwrap();
    let mut engine = engine(&model, 256);
    let prompt = chat(&text, "Tell me a bedtime story about a robot.");
    let mut draw = |seed| {
        let sampler = SamplerOptions { temperature: 1.0, seed, ..SamplerOptions::default() };
        let options = Generate { sampler, max_tokens: Some(40), ..Generate::default() };
        answer(&mut engine, &text, &prompt, &options).0
    };
    let (a, b, again) = (draw(1), draw(2), draw(1));
    assert_eq!(a, again);
    assert_ne!(a, b);
}

#[test]
fn stop_strings_end_before_themselves_and_cross_tokens() {
    let model = nano();
    let text = Text::open(&model).unwrap();
    let mut engine = engine(&model, 256);
    let prompt = chat(&text, "What is 27 + 58?");
    let options = Generate { stop: vec!["8 = ".to_string()], ..Generate::default() };
    assert_eq!(answer(&mut engine, &text, &prompt, &options), ("27 + 5".to_string(), Finish::StopString));
    // A stop string that only begins to appear is given out in the end.
    let options = Generate { stop: vec!["85. And".to_string()], ..Generate::default() };
    assert_eq!(
        answer(&mut engine, &text, &prompt, &options),
        ("27 + 58 = 85.".to_string(), Finish::EndToken)
    );
}

#[test]
fn limits_are_reported_never_silent() {
    let model = nano();
    let text = Text::open(&model).unwrap();
    let prompt = chat(&text, "Tell me a bedtime story about a robot.");
    let mut small = engine(&model, prompt.len() + 10);
    let options = Generate { ignore_end: true, ..Generate::default() };
    let mut session = small.session();
    let mut generation = session.generate(&text, &prompt, &options).unwrap();
    let mut tokens = 0;
    while let Some(piece) = generation.next_piece().unwrap() {
        tokens += usize::from(piece.token.is_some());
    }
    // Ten fit behind the prompt; the eleventh was sampled from the last one's logits.
    assert_eq!((tokens, generation.finish()), (11, Some(Finish::ContextFull)));
    drop(session);

    let long: Vec<u32> = prompt.iter().cycle().take(100).copied().collect();
    let mut session = small.session();
    let error = session.generate(&text, &long, &options).err().unwrap();
    let message = error.to_string();
    assert!(matches!(error, EngineError::ContextOverflow { have: 0, add: 100, .. }), "{message}");
    assert!(message.contains("--ctx") && message.contains("2048"), "{message}");
    assert!(session.tokens().is_empty(), "nothing of it was computed");

    let options = Generate { max_tokens: Some(3), ..Generate::default() };
    drop(session);
    assert_eq!(answer(&mut small, &text, &prompt, &options).1, Finish::MaxTokens);
}

#[test]
fn cancelling_stops_between_steps() {
    let model = nano();
    let text = Text::open(&model).unwrap();
    let mut engine = engine(&model, 512);
    let options = Generate { ignore_end: true, ..Generate::default() };
    let mut session = engine.session();
    let prompt = chat(&text, "Hello!");
    let mut generation = session.generate(&text, &prompt, &options).unwrap();
    generation.next_piece().unwrap();
    options.cancel.store(true, Ordering::Relaxed);
    while generation.next_piece().unwrap().is_some() {}
    assert_eq!(generation.finish(), Some(Finish::Cancelled));
    assert_eq!(generation.timings().generated_tokens, 1);
    drop(session);
    let mut session = engine.session();
    let generation = session.generate(&text, &prompt, &options).unwrap();
    assert_eq!(generation.finish(), Some(Finish::Cancelled), "before the prompt");
}

#[test]
fn refused_steps_change_nothing() {
    let model = nano();
    let mut engine = engine(&model, 128);
    let free = engine.free_pages();
    let id = engine.new_sequence();
    let step = |engine: &mut Engine, tokens: &[u32]| {
        engine.step(&[Chunk { sequence: id, tokens, outs: Outs::Last, window: false }]).map(|l| l.len())
    };
    assert_eq!(step(&mut engine, &[1, 2, 3]).unwrap(), 1);
    assert!(matches!(
        step(&mut engine, &[9000]),
        Err(EngineError::TokenOutOfRange { id: 9000, vocab: 8192 })
    ));
    assert!(matches!(step(&mut engine, &[]), Err(EngineError::EmptyStep)));
    assert!(matches!(step(&mut engine, &[1; 126]), Err(EngineError::ContextOverflow { .. })));
    let twice = Chunk { sequence: id, tokens: &[1], outs: Outs::Last, window: false };
    assert!(matches!(engine.step(&[twice, twice]), Err(EngineError::SequenceTwice)));
    assert_eq!(engine.tokens(id).unwrap(), [1, 2, 3]);
    // Two long sequences do not fit the memory of one: the first to write gets a copy of the shared page.
    let other = engine.fork(id).unwrap();
    assert_eq!(engine.free_pages(), 1);
    step(&mut engine, &[4; 60]).unwrap();
    let result = engine
        .step(&[Chunk { sequence: other, tokens: &[4; 100], outs: Outs::Last, window: false }])
        .map(|l| l.len());
    assert!(
        matches!(result, Err(EngineError::OutOfPages { needed: 1, free: 0, total: 2, .. })),
        "{result:?}"
    );
    assert_eq!(engine.tokens(other).unwrap(), [1, 2, 3]);
    engine.release(id).unwrap();
    assert!(matches!(engine.truncate(id, 0), Err(EngineError::UnknownSequence(_))));
    assert!(matches!(engine.truncate(other, 4), Err(EngineError::BadTruncation { len: 3, to: 4 })));
    engine.release(other).unwrap();
    assert_eq!(engine.free_pages(), free);
}

#[test]
fn impossible_options_are_refused_by_name() {
    let model = nano();
    let refused = |change: fn(&mut EngineOptions)| {
        let mut options = EngineOptions::new(cpu(1, Isa::detect()));
        change(&mut options);
        Engine::open(&model, options, &mut |_, _| ()).err().unwrap().to_string()
    };
    assert_eq!(
        refused(|o| o.context = Some(4096)),
        "a context of 4096 tokens (--ctx) exceeds the 2048 that this model was made for"
    );
    assert_eq!(refused(|o| o.context = Some(0)), "the context size is 0; it must be at least 1");
    assert!(refused(|o| o.sequences = 5000).contains("number of sequences"));
    let bad = SamplerOptions { temperature: -1.0, ..SamplerOptions::default() };
    let error = minfer_engine::Sampler::new(&bad).err().unwrap().to_string();
    assert_eq!(error, "the temperature is -1; it must be a number from 0 up");
}
