//! What a browser shows of running clusters, and what one can do there.

use std::process::Command;
use std::time::Duration;

use cuda_cluster::cluster::Client;
use nix::sys::signal::Signal;

use super::browser::Browser;
use super::dashboard::{EIGHT, Served, down, up_dask};
use super::packages::{self, packages};
use super::sandbox::{Sandbox, eventually};

/// Brings up eight workers and shows them.
fn eight_shown(browser: &Browser, sandbox: &Sandbox, name: &str) -> Served {
    let up = sandbox.run(&[&EIGHT[..], &["--name", name, "--detach"]].concat());
    assert_eq!(up.code, 0, "{up}");
    let served = Served::start(sandbox);
    browser.look_like(1440, "light");
    browser.open(&served.link);
    browser.wait_for("document.querySelectorAll('#machine .worker.good').length === 8");
    served
}

#[test]
fn a_browser_shows_a_killed_worker_red_and_green_again_and_what_is_known_of_it() {
    let Some(browser) = Browser::start() else { return };
    let sandbox = Sandbox::new();
    let served = eight_shown(&browser, &sandbox, "alive");
    assert_eq!(browser.script("return location.search"), "", "the token is not in the address");
    browser.wait_for("document.querySelectorAll('#matrix .cell.lane').length === 56");
    browser.wait_for("document.querySelector('#charts canvas')");
    // The present values, without a pointer over a chart.
    let told = "document.querySelectorAll('#charts .chart .u-series .u-value')";
    browser.wait_for(&format!("{told}.length > 17 && [...{told}].slice(0, 18).every((value) => /now|\\d/.test(value.textContent))"));

    browser.click("#machine [data-worker='gpu3']");
    browser.wait_for("document.querySelector('#details-title').textContent === 'gpu3'");
    browser.wait_for("document.querySelector('#details .why li')");
    browser.wait_for("document.querySelector('#details .log').textContent.length > 20");
    browser.wait_for("document.querySelectorAll('#machine .lane.good').length === 7");

    let pid = sandbox.state("alive")["workers"][3]["pid"].as_u64().expect("a pid");
    sandbox.kill(pid);
    browser.wait_for("document.querySelector('#machine .worker.bad[data-worker=gpu3]')");
    browser.wait_for("document.querySelector('#worker-table tr.bad[data-row=gpu3]')");
    browser.picture("killed-1440-light");
    browser.wait_for("document.querySelector('#machine .worker.good[data-worker=gpu3]')");
    browser.wait_for("document.querySelector('#events').textContent.includes('SIGKILL')");
    browser.wait_for("document.querySelector('#details').textContent.includes('SIGKILL')");

    // A change needs a yes; then it is done.
    browser.click("#scale");
    browser.wait_for("document.querySelector('#dialog').open");
    browser.script("document.querySelector('#dialog input').value = 6");
    browser.click("#dialog-ok");
    browser.wait_for("document.querySelectorAll('#machine .worker.good').length === 6");
    browser.wait_for("document.querySelectorAll('#worker-table tr.off').length === 2");
    browser.wait_for("document.querySelectorAll('#matrix .cell.lane').length === 30");
    assert_eq!(sandbox.state("alive")["workers"][7]["state"], "stopped");
    browser.click("#scale");
    browser.wait_for("document.querySelector('#dialog').open");
    browser.script("document.querySelector('#dialog input').value = 8");
    browser.click("#dialog-ok");
    browser.wait_for("document.querySelectorAll('#machine .worker.good').length === 8");
    browser.wait_for("document.querySelectorAll('#matrix .cell.lane').length === 56");

    // The functions of native tasks.
    let bench = sandbox.run(&["bench", "tasks", "alive", "--count", "100"]);
    assert_eq!(bench.code, 0, "{bench}");
    browser.wait_for("document.querySelectorAll('#functions tbody tr').length > 0");
    // Those that wait and run, while they do.
    let client = Client::connect(&sandbox.base().join("alive")).expect("the scheduler answers");
    let tasks = client.map("sleep", [2_000_000u64; 40]).expect("submitted");
    browser.wait_for(
        "[...document.querySelectorAll('#functions tbody tr')].some(row => \
         row.cells[0].textContent === 'sleep' && \
         Number(row.cells[2].textContent) + Number(row.cells[3].textContent) > 30)",
    );
    drop((tasks, client));
    browser.click("#stop");
    browser.wait_for("document.querySelector('#dialog').open");
    browser.click("#dialog-ok");
    browser.wait_for("document.body.classList.contains('ended')");
    browser.wait_for("!document.querySelector('#banner').hidden");
    assert_eq!(browser.script("return document.querySelectorAll('#machine .worker').length"), 8);
    browser.picture("ended-1440-light");
    assert_eq!(browser.errors(), [""; 0]);
    served.end();
    eventually("its end", Duration::from_secs(30), || sandbox.try_state("alive").is_none());
}

#[test]
fn the_keyboard_alone_reaches_every_worker_its_details_and_actions_and_shows_where_it_is() {
    const TAB: &str = "\u{e004}";
    const ENTER: &str = "\u{e007}";
    const ESCAPE: &str = "\u{e00c}";
    let Some(browser) = Browser::start() else { return };
    let sandbox = Sandbox::new();
    let served = eight_shown(&browser, &sandbox, "keys");
    browser.wait_for("document.querySelector('#matrix svg')");

    // What has the focus, and whether that is seen: an outline, or a thicker edge in the picture.
    let here = "const at = document.activeElement; \
        const name = at.dataset.worker ?? at.dataset.device ?? (at.tagName === 'svg' ? 'matrix' : at.id || at.textContent); \
        const edge = at.closest('#machine') && at.querySelector('rect'); \
        const seen = edge ? getComputedStyle(edge).strokeWidth === '3px' \
            : getComputedStyle(at).outlineStyle !== 'none'; \
        return [name, seen]";
    let mut met = Vec::new();
    for _ in 0..80 {
        browser.press(TAB);
        let at = browser.script(here);
        let name = at[0].as_str().expect("a name").to_owned();
        if at[0] == "" || browser.script("return document.activeElement === document.body") == true
        {
            break;
        }
        assert_eq!(at[1], true, "the focus on {name} is seen");
        met.push(name);
    }
    for worker in (0..8).map(|number| format!("gpu{number}")) {
        let times = met.iter().filter(|name| **name == worker).count();
        assert_eq!(times, 2, "{worker} in the picture and in the table: {met:?}");
    }
    for part in
        ["verify", "scale", "report", "stop", "GPU0", "NIC0", "scheduler", "matrix", "events"]
    {
        assert!(met.iter().any(|name| name == part), "{part}: {met:?}");
    }

    // Enter shows the details, which the next keys reach; Escape leads back.
    for selector in ["#machine [data-worker=gpu5]", "#worker-table [data-row=gpu5] button"] {
        browser.script(&format!("document.querySelector('{selector}').focus()"));
        browser.press(ENTER);
        browser.wait_for("document.activeElement.id === 'details-title'");
        browser.wait_for("document.activeElement.textContent === 'gpu5'");
        browser.press(TAB);
        browser.wait_for("document.activeElement.textContent === 'Restart'");
        browser.press(ENTER);
        browser.wait_for("document.querySelector('#dialog').open");
        browser.press(ESCAPE);
        browser.wait_for("!document.querySelector('#dialog').open");
        browser.press(ESCAPE);
        browser.wait_for("document.querySelector('#details').hidden");
        browser.wait_for(&format!("document.activeElement.matches('{selector}')"));
    }
    assert_eq!(browser.errors(), [""; 0]);
    served.end();
    down(&sandbox, "keys");
}

#[test]
fn the_page_fits_its_window_light_and_dark_with_two_workers_and_with_seventy_two() {
    let Some(browser) = Browser::start() else { return };
    let sandbox = Sandbox::new();
    let two = ["up", "--topology", "rtx-4090-2", "--simulate", "--name", "w2", "--detach"];
    assert_eq!(sandbox.run(&two).code, 0);
    let many = ["run", "--topology", "dgx-h100", "--simulate", "--workers-per-gpu", "9"];
    let many = sandbox.spawn(&[&many[..], &["--name", "w72", "--", "sleep", "1000"]].concat());
    eventually("72 workers", Duration::from_secs(120), || {
        sandbox.try_state("w72").is_some_and(|state| state["state"] == "ready")
    });
    let served = Served::start(&sandbox);
    for (name, workers) in [("w2", 2), ("w72", 72)] {
        for (width, scheme) in [(1440, "light"), (1440, "dark"), (390, "light"), (390, "dark")] {
            browser.look_like(width, scheme);
            browser.open("about:blank");
            // One address alone: the page behind the link goes on by itself, and would overtake
            // another.
            browser.open(&format!("{}&cluster={name}", served.link));
            let good = "document.querySelectorAll('#machine .worker.good').length";
            browser.wait_for(&format!("{good} === {workers}"));
            browser.wait_for("document.querySelector('#charts canvas')");
            browser.picture(&format!("{name}-{width}-{scheme}"));
            browser.assert_it_fits(&format!("{name} at {width}"));
            // Words beside the colours.
            let words = "[...document.querySelectorAll('#worker-table tbody td:nth-child(2)')]\
                         .every((cell) => /READY/.test(cell.textContent))";
            browser.wait_for(words);
            assert_eq!(browser.errors(), [""; 0], "{name} {width} {scheme}");
        }
    }
    served.end();
    down(&sandbox, "w2");
    down(&sandbox, "w72");
    many.wait();
    sandbox.assert_nothing_is_left();
}

#[test]
fn what_a_program_writes_is_text_on_the_page() {
    let Some(browser) = Browser::start() else { return };
    let sandbox = Sandbox::new();
    let evil = "echo '<img src=x onerror=\"document.title=1\"><b>bold</b>'; echo API_TOKEN=hush; sleep 1000";
    let run =
        ["run", "--gpus", "none", "--cpu-workers", "1", "--name", "evil", "--", "sh", "-c", evil];
    let run = sandbox.spawn(&run);
    eventually("a worker", Duration::from_secs(60), || {
        sandbox.try_state("evil").is_some_and(|state| state["state"] == "ready")
    });
    let served = Served::start(&sandbox);
    browser.open(&served.link);
    browser.wait_for("document.querySelector('#worker-table tbody button')");
    browser.click("#worker-table tbody button");
    browser.wait_for("document.querySelector('#details .log').textContent.includes('<b>bold</b>')");
    assert_eq!(browser.script("return document.querySelectorAll('img[src=x], b').length - document.querySelectorAll('#events b').length"), 0);
    let shown = browser.script("return document.body.textContent");
    assert!(!shown.to_string().contains("hush"), "{shown}");
    assert_eq!(browser.errors(), [""; 0]);
    served.end();
    down(&sandbox, "evil");
    run.wait();
}

#[test]
fn what_was_measured_is_not_said_of_a_worker_that_is_stopped_or_was_replaced() {
    let Some(browser) = Browser::start() else { return };
    let sandbox = Sandbox::new();
    let served = eight_shown(&browser, &sandbox, "measured");
    let answer = "document.querySelector('#pairs-answer').textContent";
    let values = "[...document.querySelectorAll('#matrix .cell.lane')].length";
    browser.click("#verify");
    browser.wait_for(&format!("/^56 of 56 ok/.test({answer})"));
    assert_eq!(browser.script(&format!("return {values}")), 0, "all pairs have a rate");

    // One can see what tasks' transfers had instead, once there were any.
    let pressed = "document.querySelector('.choice button[aria-pressed=true]')?.textContent ?? ''";
    assert_eq!(browser.script("return document.querySelector('.choice').hidden"), true);
    let moved = ["bench", "transpose", "measured", "--chunks", "4", "--chunk-size", "64"];
    let moved = sandbox.run(&[&moved[..], &["--runs", "1"]].concat());
    assert_eq!(moved.code, 0, "{moved}");
    browser.wait_for("!document.querySelector('.choice').hidden");
    browser.wait_for(&format!("/^measured at \\d/.test({pressed})"));
    let figures =
        "[...document.querySelectorAll('#matrix .value')].map((one) => one.textContent).join()";
    let measured = browser.script(&format!("return {figures}"));
    browser.click(".choice button[value=now]");
    browser.wait_for(&format!("{pressed} === 'of tasks now'"));
    assert_ne!(browser.script(&format!("return {figures}")), measured);
    browser.click(".choice button[value=measured]");
    browser.wait_for(&format!("{figures} === {measured}"));

    // The next readings of the figures show it; nothing else has to happen.
    browser.script(
        "window.readings = 0; window.told = null; \
         const live = new EventSource('api/clusters/measured/live'); \
         live.addEventListener('figures', () => { readings += 1; }); \
         live.addEventListener('state', (event) => { \
             const silent = JSON.parse(event.data).workers.some((one) => one.state === 'unresponsive'); \
             told = silent ? (told ?? readings) : null; })",
    );
    browser.wait_for("readings > 0");
    let pid_of = |worker: usize| {
        sandbox.state("measured")["workers"][worker]["pid"].as_u64().expect("a pid")
    };
    for worker in [1, 2, 3, 5] {
        let pid = pid_of(worker);
        let before = browser.script("return readings").as_u64().expect("a number");
        sandbox.signal(pid, Signal::SIGSTOP);
        browser.wait_for("told !== null");
        let told = browser.script("return told").as_u64().expect("a number");
        assert!(told - before <= 2, "{} readings until it is told", told - before);
        if worker != 5 {
            sandbox.signal(pid, Signal::SIGCONT);
            browser.wait_for("told === null");
        }
    }
    let pid = pid_of(5);
    browser.wait_for(
        "/^✕ gpu5 not answering since \\d+:\\d\\d:\\d\\d/.test(document.querySelector('#phase').textContent)",
    );
    browser.wait_for(&format!("/^42 of 42 ok.*; 14 are out of date/.test({answer})"));
    // Their figures stay, grey, and say so.
    let old = "document.querySelectorAll('#matrix .cell.stale')";
    browser.wait_for(&format!("{old}.length === 14 && {values} === 0"));
    browser.script(&format!(
        "{old}[0].dispatchEvent(new PointerEvent('pointerover', {{ bubbles: true }}))"
    ));
    browser.wait_for(
        "/GB\\/s at \\d.*, out of date/.test(document.querySelector('#pair').textContent)",
    );
    let words = "document.querySelector('#machine .worker[data-worker=gpu5]')";
    let apart = format!(
        "const [name, doing] = ['.strong', '.doing'].map((part) => {words}.querySelector(part)); \
         return doing.textContent === 'not answering' \
             && doing.getBoundingClientRect().top > name.getBoundingClientRect().top + 4"
    );
    assert_eq!(browser.script(&apart), true, "the reason is below the name");
    browser.picture("stopped-1440-light");

    // Another process in its place was never measured.
    sandbox.kill(pid);
    browser.wait_for("document.querySelectorAll('#machine .worker.good').length === 8");
    browser.wait_for(&format!("/^42 of 42 ok.*; 14 are out of date/.test({answer})"));

    // Without the server nothing is known to be READY.
    let pid = served.pid();
    sandbox.kill(pid);
    browser.wait_for(
        "document.querySelector('#phase').textContent.startsWith('✕ no connection since ')",
    );
    browser.wait_for("document.querySelector('#stop').disabled");
    browser.picture("lost-1440-light");
    down(&sandbox, "measured");
}

#[test]
fn the_links_of_dasks_workers_are_verified_by_a_click_and_those_who_joined_are_shown() {
    let Some(browser) = Browser::start().filter(|_| packages()) else { return };
    let sandbox = Sandbox::new();
    up_dask(&sandbox, &["--protocol", "tcp", "--name", "dask"]);
    let served = Served::start(&sandbox);
    browser.look_like(390, "light");
    browser.open(&served.link);
    browser.wait_for("document.querySelectorAll('#machine .worker.good').length === 2");
    browser.click("#verify");
    browser.wait_for("/^2 of 2 ok/.test(document.querySelector('#pairs-answer').textContent)");
    let shown = "!document.querySelector('#joined').hidden";
    assert_eq!(browser.script(&format!("return {shown}")), false, "nobody has joined");
    let file = sandbox.state("dask")["run_directory"].as_str().expect("a path").to_owned();
    let join = ["--join", &format!("{file}/scheduler.json"), "--name", "guests"];
    up_dask(&sandbox, &join);
    let rows =
        |class: &str| format!("document.querySelectorAll('#joined-table tr.{class}').length");
    browser.wait_for(&format!("{shown} && {} === 2", rows("good")));
    browser.picture("dask-390-light");
    browser.look_like(1440, "dark");
    browser.picture("dask-1440-dark");
    let pid = sandbox.state("guests")["workers"][0]["pid"].as_u64().expect("a pid");
    sandbox.signal(pid, Signal::SIGKILL);
    let lost = "[...document.querySelectorAll('#events li')].some((one) => \
                /guests-gpu0 of .* is lost: its connection broke/.test(one.textContent))";
    browser.wait_for(lost);
    // Its own supervisor starts it again.
    let back = "[...document.querySelectorAll('#events li')].filter((one) => \
                /guests-gpu0 of .* has joined/.test(one.textContent)).length === 2";
    browser.wait_for(back);
    browser.wait_for(&format!("{} === 2", rows("good")));
    down(&sandbox, "guests");
    let left = "[...document.querySelectorAll('#joined-table tbody tr')].every((row) => \
                /left: it was retired/.test(row.textContent))";
    browser.wait_for(left);
    browser.picture("dask-left-1440-dark");
    assert_eq!(browser.errors(), Vec::<String>::new());
    down(&sandbox, "dask");
}

#[test]
fn which_wires_the_bytes_took_is_on_the_page_where_they_are_counted() {
    let Some(browser) = Browser::start() else { return };
    let sandbox = Sandbox::new();
    let folder = sandbox.runtime().join("ring");
    std::fs::create_dir(&folder).expect("a folder");
    let program = packages::root().join("tests/python/ring.py");
    let what = ["run", "--topology", "dgx-h100", "--simulate", "--audit", "--name", "ring"];
    let programs = ["--program", "trainer=1", "--program", "rollout=1", "--"];
    let (program, place) = (program.to_str(), folder.to_str());
    let rank = ["python3", program.expect("a path"), "8000000", place.expect("a path")];
    let run = sandbox.spawn(&[&what[..], &programs, &rank, &[":"], &rank].concat());
    eventually("ranks", Duration::from_secs(60), || {
        sandbox.try_state("ring").is_some_and(|state| state["state"] == "ready")
    });
    let served = Served::start(&sandbox);
    browser.look_like(1440, "light");
    browser.open(&served.link);
    let told = |text: &str| {
        format!(
            "!document.querySelector('#wires').hidden && \
             [...document.querySelectorAll('#wires-list li')].some((one) => \
             one.textContent === '{text}')"
        )
    };
    browser.wait_for(&told("TCP: gpu0 → gpu1: 7.6 MiB (NV18)"));
    browser.wait_for(&told("TCP: gpu1 → gpu0: 7.6 MiB (NV18)"));
    browser.click("#worker-table tbody button");
    browser.wait_for("/Program *trainer/.test(document.querySelector('#details').textContent)");
    browser.picture("wires-1440-light");
    assert_eq!(browser.errors(), [""; 0]);
    std::fs::write(folder.join("end"), "").expect("written");
    let said = run.wait();
    assert_eq!(said.code, 0, "{said}");
    assert!(said.stderr.contains("TCP: gpu0 → gpu1: 7.6 MiB (NV18)"), "{said}");
    served.end();
    sandbox.assert_nothing_is_left();
}

#[test]
fn long_lines_of_a_log_are_cut_and_new_ones_leave_a_selection_alone() {
    let Some(browser) = Browser::start() else { return };
    let sandbox = Sandbox::new();
    let go = sandbox.runtime().join("go");
    let script = format!(
        "for line in 1 2 3; do head -c 10000000 /dev/zero | tr '\\0' x; echo; done; \
         echo 'a line to select'; until [ -e {} ]; do sleep 0.1; done; \
         printf 'one more\\033[31m, red\\n'; exec sleep 1000",
        go.display()
    );
    // Nobody reads what it relays.
    let mut run = Command::new("sh");
    run.args(["-c", "exec \"$0\" \"$@\" > /dev/null", env!("CARGO_BIN_EXE_cuda-cluster"), "run"]);
    run.args(["--gpus", "none", "--cpu-workers", "1", "--name", "long", "--", "sh", "-c", &script]);
    let run = sandbox.spawn_program(run);
    eventually("a worker", Duration::from_secs(60), || {
        sandbox.try_state("long").is_some_and(|state| state["state"] == "ready")
    });
    let served = Served::start(&sandbox);
    browser.open(&served.link);
    browser.wait_for("document.querySelector('#worker-table tbody button')");
    browser.click("#worker-table tbody button");
    let log = "document.querySelector('#details .log')";
    browser.wait_for(&format!("{log}.textContent.includes('a line to select')"));
    let length = browser.script(&format!("return {log}.textContent.length"));
    assert!(length.as_u64().is_some_and(|length| (9_000..20_000).contains(&length)), "{length}");
    let cut = browser.script(&format!("return {log}.textContent.match(/more bytes/g).length"));
    assert_eq!(cut, 3);
    browser.script(&format!("getSelection().selectAllChildren({log}.lastElementChild)"));
    std::fs::write(&go, "").expect("written");
    browser.wait_for(&format!("{log}.textContent.includes('one more, red')"));
    let selected = browser.script("return String(getSelection())");
    assert!(
        selected.as_str().is_some_and(|text| text.ends_with("a line to select\n")),
        "{selected}"
    );
    assert_eq!(browser.errors(), [""; 0]);
    served.end();
    down(&sandbox, "long");
    run.wait();
}

#[test]
fn the_page_shows_what_happened_before_it_was_opened_and_every_text_as_it_is() {
    let Some(browser) = Browser::start() else { return };
    let sandbox = Sandbox::new();
    let spec = sandbox.runtime().join("spec.yaml");
    let env = "version: 1\nworker: {env: {GREETING: \"a\\u202eb\\e[8mc\"}}\n";
    std::fs::write(&spec, env).expect("written");
    let spec = spec.to_str().expect("a path");
    let sixteen = ["up", "--topology", "dgx-2", "--simulate", "--name", "wide", "--detach"];
    let up = sandbox.run(&[&sixteen[..], &["-f", spec]].concat());
    assert_eq!(up.code, 0, "{up}");
    let served = Served::start(&sandbox);
    // Takes the supervisor longer than the first reading of the figures, which begins before it.
    served.metrics();
    served.metrics();
    browser.look_like(1440, "light");
    browser.open(&served.link);
    browser.wait_for("document.querySelectorAll('#machine .worker.good').length === 16");
    browser.script(
        "window.first = null; const live = new EventSource('api/clusters/wide/live'); \
         live.addEventListener('figures', (event) => { first ??= JSON.parse(event.data).at; })",
    );
    browser.wait_for("first !== null");
    assert_eq!(browser.script("return first < performance.timeOrigin"), true, "history");
    browser
        .wait_for("/^measured since \\d/.test(document.querySelector('#time-since').textContent)");

    // All of it is inside the picture, and no label lies over another.
    let inside = "const place = document.querySelector('#machine'); \
                  return place.scrollWidth - place.clientWidth";
    assert_eq!(browser.script(inside), 0);
    let over = "const boxes = (texts) => [...document.querySelectorAll(texts)].map((one) => one.getBoundingClientRect()); \
        const meet = (a, b) => a.left < b.right && b.left < a.right && a.top + 1 < b.bottom && b.top + 1 < a.bottom; \
        return ['#machine .legend text', '#charts .u-series', '#matrix text:not([transform])'].flatMap((texts) => \
            boxes(texts).flatMap((a, at, all) => all.slice(at + 1).filter((b) => meet(a, b)).map(() => texts)))";
    assert_eq!(browser.script(over).to_string(), "[]");
    // Red is for what is wrong.
    let red = "return [...document.querySelectorAll('#machine [stroke], #machine [fill]')].some((part) => \
               ['stroke', 'fill'].some((name) => part.getAttribute(name) === '#e0555a'))";
    assert_eq!(browser.script(red), false);

    browser.click("#worker-table [data-row=gpu3] button");
    let greeting = "[...document.querySelectorAll('#details dl.mono dt')].find((name) => name.textContent === 'GREETING')";
    browser.wait_for(greeting);
    let value = browser.script(&format!("return {greeting}.nextElementSibling.textContent"));
    assert_eq!(value, "a\\u{202e}b\\u{1b}[8mc");
    let why = browser.script("return document.querySelector('#details .why').textContent");
    assert!(why.as_str().is_some_and(|why| why.contains("a\\u{202e}b\\u{1b}[8mc")), "{why}");

    // The button that stops the cluster does not look like the others.
    browser.click("#stop");
    let kind = browser.script("return document.querySelector('#dialog-ok').className");
    assert_eq!(kind, "danger filled");
    browser.script("document.querySelector('#dialog').close()");
    assert_eq!(browser.errors(), [""; 0]);
    served.end();
    down(&sandbox, "wide");
}
