//! Workers of the native engine whose tasks do not end.

use std::process::ExitCode;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use cuda_cluster::cluster::{self, Context, FunctionError, Input, Registry};

fn main() -> ExitCode {
    cluster::dispatch_with(functions).unwrap_or(ExitCode::FAILURE)
}

fn functions() -> Registry {
    let mut registry = Registry::built_in();
    registry.add("sleep_long", sleep_long).add("wait_for_nobody", wait_for_nobody);
    registry.add("compute", compute).add("next", |_, _| Ok(()));
    registry
}

#[inline(never)]
fn sleep_long(_: &Context<'_>, _: &[Input]) -> Result<(), FunctionError> {
    std::thread::sleep(Duration::from_secs(3600));
    Ok(())
}

/// Waits for what nobody does.
#[inline(never)]
fn wait_for_nobody(_: &Context<'_>, _: &[Input]) -> Result<(), FunctionError> {
    let (done, changed) = (Mutex::new(false), Condvar::new());
    let mut is_done = done.lock().unwrap_or_else(PoisonError::into_inner);
    while !*is_done {
        is_done = changed.wait(is_done).unwrap_or_else(PoisonError::into_inner);
    }
    Ok(())
}

#[inline(never)]
fn compute(context: &Context<'_>, _: &[Input]) -> Result<(), FunctionError> {
    let mut number = 1u64;
    while context.end_if_cancelled().is_ok() {
        number = std::hint::black_box(number.wrapping_mul(0x9e37_79b9));
    }
    Err("nobody wants it".into())
}
