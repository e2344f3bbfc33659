//! The functions that a thread of a program without Python waits in.
#![allow(missing_docs)]

use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use cuda_cluster_why::evidence::{Function, Rank};
use cuda_cluster_why::look::{Limits, look};

#[inline(never)]
fn waits_for_a_condition(lock: &Mutex<bool>, condition: &Condvar) {
    let mut over = lock.lock().expect("nobody panics");
    while !*over {
        over = condition.wait(over).expect("nobody panics");
    }
}

/// The functions of this process's thread of this name.
fn functions(name: &str) -> Vec<Function> {
    let rank = Rank { name: "this".to_owned(), pid: Some(std::process::id()), ..Rank::default() };
    let evidence = look(vec![rank], false, Limits::default());
    let mut threads = evidence.processes.into_iter().flat_map(|process| process.threads);
    threads.find(|thread| thread.name == name).map_or(Vec::new(), |thread| thread.functions)
}

/// The standard library keeps frame pointers, which the kernel does not tell of a thread that
/// waits, and programs that are not optimised call it by an address in a register.
#[test]
fn a_thread_that_waits_for_a_condition_is_followed_to_who_waits() {
    let shared = Arc::new((Mutex::new(false), Condvar::new()));
    let (over, waits) = (Arc::clone(&shared), Arc::clone(&shared));
    let thread = std::thread::Builder::new().name("waits".to_owned());
    let thread = thread.spawn(move || waits_for_a_condition(&waits.0, &waits.1)).expect("a thread");
    let own = |one: &Function| one.name.ends_with("::waits_for_a_condition");
    let mut found = Vec::new();
    for _ in 0..100 {
        found = functions("waits");
        if found.iter().any(own) {
            break;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    *over.0.lock().expect("nobody panics") = true;
    over.1.notify_all();
    thread.join().expect("it ends");
    let at = found.iter().position(own);
    // What it has called, and who has called it: a thread's first functions.
    let first = found.last().map(|one| one.name.as_str());
    assert!(at.is_some_and(|at| at > 0 && at + 3 < found.len()), "{found:?}");
    assert!(first.is_some_and(|name| !name.contains("waits_for")), "{found:?}");
}
