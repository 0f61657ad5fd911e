//! The spans that a trace keeps of an engine's operations.

use std::sync::Arc;
use std::sync::mpsc;
use std::thread;
use std::time::Instant;

use paramhub_collective::engine::{Completion, Engine, EngineConfig, Kind, Span, Trace};

use super::common::{Never, config};

fn traced(limit: usize) -> (Engine, Arc<Trace>) {
    let trace = Arc::new(Trace::with_limit(Instant::now(), limit));
    let config = EngineConfig { observer: Some(Arc::clone(&trace) as _), ..config([1, 1, 1]) };
    (Engine::new(config).unwrap(), trace)
}

fn nothing() -> Never {
    Ok(())
}

#[test]
fn operations_are_spans_of_the_threads_that_began_them() {
    let (engine, trace) = traced(100);
    let variable = engine.variable();
    engine.operation("unseen", Kind::Copy).mutates([&variable]).push(nothing).unwrap();
    engine.wait_for_all().unwrap();
    trace.switch(true);
    let (give, given) = mpsc::channel::<Completion>();
    engine.operation("forward", Kind::Compute).mutates([&variable]).push(nothing).unwrap();
    let send = engine.operation("send", Kind::Communicate).mutates([&variable]);
    send.push_deferred(move |completion| give.send(completion).unwrap()).unwrap();
    let elsewhere = thread::spawn(move || given.recv().unwrap().complete());
    engine.wait_for_var(&variable).unwrap();
    elsewhere.join().unwrap();
    assert_eq!(trace.note("wait", Kind::Copy, || 7), 7);
    trace.switch(false);
    engine.operation("unseen", Kind::Copy).mutates([&variable]).push(nothing).unwrap();
    trace.note("unseen", Kind::Copy, || ());
    engine.wait_for_all().unwrap();

    let (spans, left_out) = trace.take();
    assert_eq!(left_out, 0);
    let description =
        |span: &Span| (span.name.clone(), span.kind, span.thread_name.to_string(), span.is_deferred);
    let here = thread::current().name().unwrap().to_owned();
    let expected = [
        ("forward", Kind::Compute, "compute 0", false),
        ("send", Kind::Communicate, "communicate 0", true),
        ("wait", Kind::Copy, here.as_str(), false),
    ];
    let expected =
        expected.map(|(name, kind, thread, deferred)| (name.into(), kind, thread.into(), deferred));
    assert_eq!(spans.iter().map(description).collect::<Vec<_>>(), expected);
    assert!(spans.iter().all(|span| span.start <= span.end), "{spans:?}");
    assert!(spans.windows(2).all(|pair| pair[0].end <= pair[1].start), "each waited for the one before");
    assert!(trace.take().0.is_empty());
}

#[test]
fn the_newest_spans_are_kept() {
    let (engine, trace) = traced(3);
    trace.switch(true);
    let variable = engine.variable();
    for number in 0..8 {
        let operation = engine.operation(format!("step {number}"), Kind::Compute).mutates([&variable]);
        operation.push(nothing).unwrap();
    }
    engine.wait_for_all().unwrap();
    let (spans, left_out) = trace.take();
    let names: Vec<&str> = spans.iter().map(|span| span.name.as_str()).collect();
    assert_eq!((names, left_out), (vec!["step 5", "step 6", "step 7"], 5));
}
