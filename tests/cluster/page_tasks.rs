//! Tasks on the page: the last that ran, how far each function is, what waits, and why.

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::time::Duration;

use cuda_cluster::cluster::Client;

use super::browser::Browser;
use super::dashboard::{EIGHT, Served, down, up_dask};
use super::packages::{packages, python};
use super::sandbox::{Sandbox, eventually};

const FACTS: &str = "document.querySelector('#tasks [role=status]').textContent";
const TOLD: &str = "document.querySelector('#tasks .pair').textContent";
const WHY: &str = "document.querySelector('#task-why').textContent";

fn row(function: &str) -> String {
    format!(
        "[...document.querySelectorAll('#functions tbody tr')]\
         .find((row) => row.cells[0].textContent === '{function}')"
    )
}

/// The number in a column of a function's row.
fn count(function: &str, column: u32) -> String {
    format!("Number({}?.cells[{column}].textContent.replace(/[^0-9]/g, ''))", row(function))
}

#[test]
fn tasks_are_shown_by_worker_and_function_with_what_waits_and_why() {
    const TAB: &str = "\u{e004}";
    const ENTER: &str = "\u{e007}";
    const LEFT: &str = "\u{e012}";
    let Some(browser) = Browser::start() else { return };
    let sandbox = Sandbox::new();
    let up = sandbox.run(&[&EIGHT[..], &["--name", "busy", "--detach"]].concat());
    assert_eq!(up.code, 0, "{up}");
    let served = Served::start(&sandbox);
    browser.look_like(1440, "light");
    browser.open(&served.link);
    browser.wait_for("document.querySelectorAll('#machine .worker.good').length === 8");
    let show = "document.querySelector('#tasks').scrollIntoView({ block: 'center' })";
    browser.script(show);
    browser.wait_for(&format!("/none has run yet/.test({FACTS})"));

    let client = Client::connect(&sandbox.base().join("busy")).expect("the scheduler answers");
    let noops = client.map("noop", (0..500u64).map(|_| ())).expect("submitted");
    client.wait(&noops).expect("they ran");
    browser.wait_for(&format!("/^500 ran since/.test({FACTS})"));
    browser.wait_for(&format!("{} === 500", count("noop", 4)));
    browser.wait_for("document.querySelector('#tasks .legend').textContent === 'noop'");

    // One fails, and what needs it can't run.
    let broken = client.submit("matrix.add_transposed_sum", &(), &[]).expect("submitted");
    let after = client.submit("sum", &(), &[&broken]).expect("submitted");
    assert!(after.wait().is_err());
    browser.wait_for("/✕ failed: 1/.test(document.querySelector('#tasks .legend').textContent)");
    browser.wait_for(&format!("{} === 1", count("matrix.add_transposed_sum", 5)));
    browser.wait_for(&format!("{} === 1", count("sum", 5)));

    // What waits is told with what for, and explained.
    let slow = client.map("sleep", [600_000_000u64; 60]).expect("submitted");
    let next = client.submit("sum", &(), &[&slow[0]]).expect("submitted");
    let waits = "[...document.querySelectorAll('#tasks .why li')]";
    let input = format!(
        "{waits}.find((one) => /^1 waits for an input that is not there yet/.test(one.textContent))"
    );
    browser.wait_for(&input);
    browser.wait_for(&format!("{} + {} === 60", count("sleep", 2), count("sleep", 3)));
    browser.script(&format!("{input}.querySelector('button').click()"));
    let (of_next, of_slow) = (next.id().to_string(), slow[0].id().to_string());
    let waiting = format!("{of_next} (sum) waits for an input: {of_slow}");
    browser.wait_for(&format!("{WHY} === '{waiting}'"));
    browser.wait_for(&format!("location.hash === '#cluster=busy&task={of_next}'"));
    for (width, scheme) in [(1440, "light"), (1440, "dark"), (390, "light"), (390, "dark")] {
        browser.look_like(width, scheme);
        browser.script(show);
        browser.picture(&format!("tasks-{width}-{scheme}"));
        browser.assert_it_fits(&format!("at {width}"));
    }
    browser.look_like(1440, "light");

    // A link leads to the explanation.
    let address = browser.script("return location.href");
    browser.open("about:blank");
    browser.open(address.as_str().expect("an address"));
    browser.wait_for(&format!("{WHY} === '{waiting}'"));

    // The keys choose a task and explain it; the pointer does, too.
    browser.script("document.querySelector('#tasks [data-span=\"300\"]').click()");
    // The workers have no room before.
    slow.iter().for_each(|one| one.cancel().expect("asked"));
    client.wait(&client.map("noop", [(); 3]).expect("submitted")).expect("they ran");
    browser.wait_for(&format!("{} === 503", count("noop", 4)));
    browser.wait_for("document.querySelector('#tasks canvas').offsetHeight > 100");
    browser.script("document.querySelector('#functions').focus()");
    browser.press(TAB);
    browser.wait_for("document.activeElement.matches('#tasks canvas')");
    browser.press(LEFT);
    browser.wait_for(&format!("/^gpu\\d: [\\w.]+ \\(\\d+:\\d+\\) · /.test({TOLD})"));
    let first = browser.script(&format!("return {TOLD}"));
    let first = first.as_str().expect("words").to_owned();
    assert!(first.contains("took ") && first.contains(" came from peers"), "{first}");
    browser.press(LEFT);
    browser.wait_for(&format!("{TOLD} !== {}", serde_json::json!(first)));
    browser.press(ENTER);
    browser.wait_for(&format!("/ (has run|has failed|is not known)/.test({WHY})"));
    browser.click("#tasks canvas");
    browser.wait_for(&format!("!/asking/.test({WHY})"));

    // What a worker does is sampled on request.
    browser.script("document.querySelector('#worker-table [data-row=gpu0] button').click()");
    browser.wait_for("document.querySelector('#details-title').textContent === 'gpu0'");
    browser.script("document.querySelector('[data-profile]').closest('details').open = true");
    browser.script("document.querySelector('[data-profile]').click()");
    let tree = "document.querySelector('#details .tree').textContent";
    browser.wait_for(&format!("/task0 \\d+ samples, \\d+ % on CPU/.test({tree})"));
    browser.wait_for(&format!("/ \\d+ % \\S*(sleep|start|main)/.test({tree})"));
    browser.picture("profile-1440-light");
    browser.script("document.querySelector('#details .quiet').click()");
    browser.script(show);

    // A pause holds what is shown, and nothing is asked.
    browser.script("[...document.querySelectorAll('#tasks .buttons button')].at(-1).click()");
    browser.wait_for(&format!("/paused$/.test({FACTS})"));
    let held = browser.script(&format!("return {FACTS}"));
    client.wait(&client.map("noop", [(), ()]).expect("submitted")).expect("they ran");
    // The counts go on.
    browser.wait_for(&format!("{} === 505", count("noop", 4)));
    assert_eq!(browser.script(&format!("return {FACTS}")), held);
    browser.script("[...document.querySelectorAll('#tasks .buttons button')].at(-1).click()");
    browser.wait_for(&format!("{FACTS} !== {held} && !/paused/.test({FACTS})"));

    let cookie = served.cookie();
    let ask = |path: &str| served.ask(&format!("GET /api/clusters/busy/{path}"), &[&cookie]);
    for (path, status) in [("tasks/x", 400), ("tasks?after=x", 400), ("tasks/9:9", 200)] {
        assert_eq!(ask(path).status, status, "{path}");
    }
    let origin = address.as_str().and_then(|link| link.split_once("/#")).expect("a link").0;
    let origin = format!("Origin: {origin}");
    let own = [cookie.as_str(), origin.as_str(), "X-Cuda-Cluster: page"];
    for (process, headers, status) in
        [("gpu0", &own[3..], 401), ("gpu0", &own[..1], 403), ("gpu99", &own[..], 404)]
    {
        let answer = served.ask(&format!("POST /api/clusters/busy/profile/{process}"), headers);
        assert_eq!(answer.status, status, "{process}: {headers:?}");
    }
    for path in ["tasks", "tasks/1:1"] {
        let answer = served.ask(&format!("GET /api/clusters/busy/{path}"), &[]);
        assert_eq!(answer.status, 401, "{path} without the token");
    }
    drop((noops, broken, after, slow, next, client));
    assert_eq!(browser.errors(), [""; 0]);
    down(&sandbox, "busy");
    browser.wait_for("document.body.classList.contains('ended')");
    browser.wait_for("document.querySelector('#functions tbody tr')");
    served.end();
    sandbox.assert_nothing_is_left();
}

#[test]
fn of_very_many_tasks_a_page_gets_a_sample_that_says_so_and_stays_small() {
    let Some(browser) = Browser::start() else { return };
    let sandbox = Sandbox::new();
    let up = sandbox.run(&[&EIGHT[..], &["--name", "many", "--detach"]].concat());
    assert_eq!(up.code, 0, "{up}");
    let served = Served::start(&sandbox);
    browser.look_like(1440, "light");
    browser.open(&served.link);
    browser.wait_for("document.querySelectorAll('#machine .worker.good').length === 8");
    browser.script("document.querySelector('#tasks').scrollIntoView({ block: 'center' })");
    let nodes = "return document.querySelectorAll('#tasks *').length";
    let bench = sandbox.run(&["bench", "tasks", "many", "--count", "30000", "--runs", "1"]);
    assert_eq!(bench.code, 0, "{bench}");
    browser.wait_for(&format!("parseInt({FACTS}.replace(/\\D/g, '')) >= 90000"));
    browser.wait_for(&format!("/a mark stands for up to \\d+/.test({FACTS})"));
    let nodes = browser.script(nodes).as_u64().expect("a number");
    assert!(nodes < 200, "{nodes} elements");
    // A page that is open for long, with 72 workers.
    let long = browser.script(
        "return import('./tasks.js').then(({ Tasks }) => { \
         const card = document.createElement('section'); document.querySelector('main').append(card); \
         const tasks = new Tasks(card, { read: () => new Promise(() => {}), chosen: () => {} }); \
         const names = Array.from({ length: 72 }, (_, at) => `gpu${at}`); \
         tasks.open({ state: {}, workers: names.map((name) => ({ name })) }); card.hidden = false; \
         let [next, most] = [0, 0]; \
         for (let second = 1; second <= 100; second += 1) { \
           const now = second * 1e6; \
           const rows = Array.from({ length: 1000 }, (_, at) => [`1:${next + at}`, at % 3, at % 72, now - at * 1000, 90000, 0, at % 500 ? 0 : 1, 20]); \
           next += 1000; \
           const began = performance.now(); \
           tasks.take({ next, ran: next * 20, now, functions: ['a', 'b', 'c'], workers: names, tasks: rows }); \
           tasks.draw(); tasks.tell(); \
           most = Math.max(most, performance.now() - began); } \
         const told = [tasks.rows.length, tasks.shown.length, card.querySelectorAll('*').length, most]; \
         card.remove(); return told; })",
    );
    assert_eq!((&long[0], &long[1]), (&60_000.into(), &60_000.into()), "{long}");
    assert!(long[2].as_u64().is_some_and(|nodes| nodes < 100), "{long}");
    let said = format!("60,000 tasks of 72 workers: drawn within {} ms\n", long[3]);
    // Not `eprintln!`, which the test harness captures.
    let _ = std::io::stderr().write_all(said.as_bytes());
    let cookie = served.cookie();
    eventually("few rows", Duration::from_secs(10), || {
        let answer = served.ask("GET /api/clusters/many/tasks", &[&cookie]);
        let told: serde_json::Value = serde_json::from_str(&answer.body).expect("JSON");
        let rows = told["tasks"].as_array().expect("rows");
        let stand_for: u64 = rows.iter().filter_map(|row| row[7].as_u64()).sum();
        let ran = told["ran"].as_u64().expect("a number");
        rows.len() <= 10_000 && (ran / 2..ran * 3 / 2).contains(&stand_for)
    });
    assert_eq!(browser.errors(), [""; 0]);
    served.end();
    down(&sandbox, "many");
    sandbox.assert_nothing_is_left();
}

/// Has Dask run tasks of which one fails and what needs it can't run, and holds them.
const WORK: &str = "
import sys
from distributed import Client, wait
with Client(scheduler_file=sys.argv[1]) as client:
    numbers = client.map(str, range(50), key='number')
    both = client.submit(sum, [[1], [2]], [], key='both', workers=list(client.scheduler_info()['workers'])[:1])
    broken = client.submit(int, 'no number', key='broken')
    here, there = client.scheduler_info()['workers']
    large = client.submit(bytes, 10_000_000, key='large', workers=[here])
    length = client.submit(len, large, key='length', workers=[there])
    wait([*numbers, both, broken, length])
    print('done', flush=True)
    sys.stdin.read()
";

#[test]
fn of_dask_the_schedulers_counts_are_shown_beside_the_workers_with_a_link_to_its_own_pages() {
    let Some(browser) = Browser::start().filter(|_| packages()) else { return };
    let sandbox = Sandbox::new();
    let path = python();
    up_dask(&sandbox, &["--protocol", "tcp", "--name", "dask"]);
    let served = Served::start(&sandbox);
    browser.look_like(1440, "light");
    browser.open(&served.link);
    browser.wait_for("document.querySelectorAll('#machine .worker.good').length === 2");
    let directory = sandbox.state("dask")["run_directory"].as_str().expect("a path").to_owned();
    let mut client = Command::new(&path)
        .args(["-c", WORK, &format!("{directory}/scheduler.json")])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("a client");
    let mut said = BufReader::new(client.stdout.take().expect("piped"));
    let mut line = String::new();
    said.read_line(&mut line).expect("a line");
    assert_eq!(line, "done\n");
    browser.wait_for(&format!("{} === 50", count("number", 4)));
    browser.wait_for(&format!("{} === 1", count("broken", 5)));
    // What was sent to the other is there twice, until Dask drops one of them.
    browser.wait_for(&format!("/ 5[34] results kept, \\d+ transfers/.test({FACTS})"));
    browser.wait_for(&format!("/, 9.5 MiB sent to workers and clients/.test({FACTS})"));
    // Beside the workers, too.
    let beside = "[...document.querySelectorAll('#worker-table tbody tr')].slice(1)\
                  .every((row) => row.cells[6].textContent === '0')";
    browser.wait_for(beside);
    browser.script("document.querySelector('#worker-table [data-row=gpu0] button').click()");
    browser.wait_for("/\\d+ results kept/.test(document.querySelector('#details').textContent)");
    let link = "document.querySelector('#dask-pages a')";
    let has_bokeh = Command::new(&path).args(["-c", "import bokeh"]).output().expect("it ran");
    if has_bokeh.status.success() {
        browser.wait_for(&format!("/^http:.*status$/.test({link}?.href)"));
    } else {
        browser.wait_for("/need Bokeh/.test(document.querySelector('#dask-pages').textContent)");
    }
    assert_eq!(browser.script("return document.querySelector('#tasks canvas').offsetHeight"), 0);
    // There is no time to choose.
    assert_eq!(browser.script("return document.querySelector('#tasks .buttons').offsetHeight"), 0);
    for (width, scheme) in [(1440, "light"), (390, "dark")] {
        browser.look_like(width, scheme);
        browser.script("document.querySelector('#tasks').scrollIntoView({ block: 'center' })");
        browser.picture(&format!("tasks-dask-{width}-{scheme}"));
    }
    let answer = served.ask("GET /api/clusters/dask/dask", &[]);
    assert_eq!(answer.status, 401, "without the token");
    drop(client.stdin.take());
    client.wait().expect("it ends");
    // What nobody holds is not kept, and stays counted.
    browser.wait_for(&format!("/ 0 results kept/.test({FACTS})"));
    assert_eq!(browser.errors(), [""; 0]);
    served.end();
    down(&sandbox, "dask");
}
