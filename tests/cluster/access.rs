//! The page for everybody: axe-core, in the real browser, finds nothing, and what is bad is told to
//! those who have asked for it.

use std::io::Write;
use std::time::Duration;

use nix::sys::signal::Signal;
use serde_json::Value;

use super::browser::Browser;
use super::dashboard::{EIGHT, Served, down};
use super::packages;
use super::sandbox::{Sandbox, eventually};
use super::skip::skip;

/// axe-core's script; `None` if it is not there, after saying so.
fn axe() -> Option<String> {
    let path = packages::root().join("target/tools/axe-core/package/axe.min.js");
    let script = std::fs::read_to_string(path).ok();
    if script.is_none() {
        skip("axe", "there is no axe-core in target/tools; scripts/setup.sh --tests");
    }
    script
}

/// Has axe-core look at the page, with all of its rules, in both schemes and at both widths.
fn nothing_is_found(browser: &Browser, axe: &str, what: &str) {
    for (width, scheme) in [(1440, "light"), (1440, "dark"), (390, "light"), (390, "dark")] {
        browser.look_like(width, scheme);
        let found = browser.script(&format!(
            "{axe}; return axe.run({{ resultTypes: ['violations'] }}).then(({{ violations, passes }}) => ({{ \
             passes: passes.length, \
             violations: violations.map((one) => [one.id, one.help, one.nodes.map((node) => [node.html, node.failureSummary])]) }}))"
        ));
        let violations = found["violations"].as_array().expect("an answer");
        let text = serde_json::to_string_pretty(violations).expect("JSON");
        assert!(violations.is_empty(), "{what}, {width}, {scheme}: {text}");
        let passes = found["passes"].as_u64().unwrap_or_default();
        // Below an open dialog nothing can be reached, and is not looked at.
        assert!(passes > 10, "{what}, {width}, {scheme}: only {passes} rules had something to say");
        let said = format!("axe-core: {what}, {width}, {scheme}: nothing, of {passes} rules\n");
        // Not `eprintln!`, which the test harness captures.
        let _ = std::io::stderr().write_all(said.as_bytes());
        browser.picture(&format!("axe-{}-{width}-{scheme}", what.replace(' ', "-")));
    }
}

#[test]
fn axe_finds_nothing_on_the_page_of_a_cluster_that_is_well_broken_or_ended() {
    let Some((browser, axe)) = axe().and_then(|axe| Some((Browser::start()?, axe))) else { return };
    let sandbox = Sandbox::new();
    let up = sandbox.run(&[&EIGHT[..], &["--name", "seen", "--detach"]].concat());
    assert_eq!(up.code, 0, "{up}");
    let served = Served::start(&sandbox);
    browser.look_like(1440, "light");
    browser.open(&served.link);
    browser.wait_for("document.querySelectorAll('#machine .worker.good').length === 8");
    browser.click("#verify");
    browser.wait_for("/^56 of 56 ok/.test(document.querySelector('#pairs-answer').textContent)");
    let bench = sandbox.run(&["bench", "tasks", "seen", "--count", "100"]);
    assert_eq!(bench.code, 0, "{bench}");
    browser.wait_for("document.querySelectorAll('#functions tbody tr').length > 0");
    nothing_is_found(&browser, &axe, "well");

    browser.click("#worker-table [data-row=gpu3] button");
    browser.wait_for("document.querySelector('#details .why li')");
    browser.script("for (const one of document.querySelectorAll('details')) one.open = true");
    browser.wait_for("document.querySelector('#details .log').textContent.length > 20");
    nothing_is_found(&browser, &axe, "details");
    browser.click("#stop");
    browser.wait_for("document.querySelector('#dialog').open");
    nothing_is_found(&browser, &axe, "dialog");
    browser.script("document.querySelector('#dialog').close()");

    let pid =
        |worker: usize| sandbox.state("seen")["workers"][worker]["pid"].as_u64().expect("a pid");
    sandbox.kill(pid(5));
    browser.wait_for("document.querySelector('#events').textContent.includes('SIGKILL')");
    browser.wait_for("document.querySelectorAll('#machine .worker.good').length === 8");
    let stopped = pid(3);
    sandbox.signal(stopped, Signal::SIGSTOP);
    browser.wait_for(
        "/gpu3 not answering since \\d/.test(document.querySelector('#phase').textContent)",
    );
    browser.wait_for("document.querySelectorAll('#matrix .cell.stale').length > 0");
    nothing_is_found(&browser, &axe, "broken");
    sandbox.signal(stopped, Signal::SIGCONT);
    down(&sandbox, "seen");
    browser.wait_for("document.body.classList.contains('ended')");
    nothing_is_found(&browser, &axe, "ended");

    // More workers than have a line each.
    let wide = ["up", "--topology", "dgx-2", "--simulate", "--name", "wide", "--detach"];
    assert_eq!(sandbox.run(&wide).code, 0);
    browser.wait_for(
        "[...document.querySelectorAll('#clusters option')].some((one) => one.value === 'wide')",
    );
    browser.script("location.hash = 'wide'");
    browser.wait_for("document.querySelectorAll('#machine .worker.good').length === 16");
    browser.wait_for("!document.querySelector('#strips').hidden");
    nothing_is_found(&browser, &axe, "sixteen");
    assert_eq!(browser.errors(), [""; 0]);
    served.end();
    down(&sandbox, "wide");
    sandbox.assert_only_the_causes_are_left("seen");
}

#[test]
fn who_has_asked_for_it_is_notified_of_what_goes_bad_and_of_nothing_else() {
    let Some(browser) = Browser::start() else { return };
    let sandbox = Sandbox::new();
    let up = sandbox.run(&[&EIGHT[..], &["--name", "watched", "--detach"]].concat());
    assert_eq!(up.code, 0, "{up}");
    let served = Served::start(&sandbox);
    browser.open(&served.link);
    browser.wait_for("document.querySelectorAll('#machine .worker.good').length === 8");
    let words = "document.querySelector('#notify').textContent";
    let origin = browser.script("return location.origin");
    browser.permit("notifications", origin.as_str().expect("an origin"));
    browser.open(&served.link);
    browser.wait_for("document.querySelectorAll('#machine .worker.good').length === 8");
    // The browser's own, which keep what they were made with.
    browser.script(
        "window.told = []; window.Notification = new Proxy(Notification, { construct: (one, [title, options]) => { \
         const made = new one(title, options); told.push(`${made.title}\\n${made.body}`); return made; } })",
    );
    let told = || browser.script("return told").as_array().cloned().unwrap_or_default();
    let pid =
        |worker: usize| sandbox.state("watched")["workers"][worker]["pid"].as_u64().expect("a pid");
    // Nobody has asked.
    sandbox.kill(pid(0));
    browser.wait_for("document.querySelector('#events').textContent.includes('SIGKILL')");
    browser.wait_for("document.querySelectorAll('#machine .worker.good').length === 8");
    assert_eq!(told(), [Value::Null; 0]);
    assert_eq!(browser.script(&format!("return {words}")), "Notify me of trouble");
    browser.click("#notify");
    browser.wait_for(&format!("{words} === 'Notifications are on'"));

    // A cluster that is scaled does what it was told to.
    let scaled = sandbox.run(&["scale", "watched", "7"]);
    assert_eq!(scaled.code, 0, "{scaled}");
    browser.wait_for("document.querySelectorAll('#worker-table tr.off').length === 1");
    assert_eq!(told(), [Value::Null; 0]);
    sandbox.kill(pid(2));
    eventually("one is told of", Duration::from_secs(30), || told().len() == 1);
    let text = told()[0].as_str().expect("a text").to_owned();
    assert!(text.starts_with("watched: "), "{text}");
    assert!(text.contains("gpu2 was ended by signal 9 (SIGKILL)"), "{text}");
    let stopped = pid(4);
    sandbox.signal(stopped, Signal::SIGSTOP);
    eventually("another is told of", Duration::from_secs(60), || told().len() == 2);
    let text = told()[1].as_str().expect("a text").to_owned();
    assert!(text.starts_with("watched: gpu4 not answering since "), "{text}");
    assert!(text.ends_with("\ngpu4 does not answer"), "{text}");
    sandbox.signal(stopped, Signal::SIGCONT);
    browser.wait_for("document.querySelector('#phase').textContent === '● READY'");

    // The wish is kept for the next visit; what is bad already then is on the page alone.
    browser.click("#notify");
    browser.wait_for(&format!("{words} === 'Notify me of trouble'"));
    sandbox.kill(pid(1));
    browser.wait_for("document.querySelectorAll('#events .bad').length > 3");
    assert_eq!(told().len(), 2);
    assert_eq!(browser.errors(), [""; 0]);
    served.end();
    down(&sandbox, "watched");
    sandbox.assert_only_the_causes_are_left("watched");
}
