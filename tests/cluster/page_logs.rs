//! The logs of all processes on the page: merged, by text and level, older and newer lines, links
//! to lines, and the file.

use std::path::PathBuf;
use std::time::Duration;

use super::browser::{Answer, Browser};
use super::dashboard::{Served, down};
use super::sandbox::{Running, Sandbox, eventually};

/// Three ranks that write; the first one much.
struct Writers {
    sandbox: Sandbox,
    run: Running,
    go: PathBuf,
}

const SCRIPT: &str = "\
echo hello of $RANK
if [ $RANK = 0 ]; then
    i=0; while [ $i -lt 5000 ]; do echo \"INFO step $i\"; i=$((i+1)); done
    head -c 100000 /dev/zero | tr '\\0' x; echo ' its end'
fi
if [ $RANK = 1 ]; then echo 'ERROR it broke'; echo '  a detail of it'; echo API_TOKEN=hush; fi
until [ -e $GO ]; do sleep 0.1; done
echo WARNING: after $RANK
exec sleep 1000";

impl Writers {
    fn start() -> Self {
        let sandbox = Sandbox::new();
        let go = sandbox.runtime().join("go");
        let script = SCRIPT.replace("$GO", go.to_str().expect("a path"));
        let run = ["run", "--gpus", "none", "--cpu-workers", "3", "--name", "write", "--"];
        let run = sandbox.spawn(&[&run[..], &["sh", "-c", &script]].concat());
        eventually("three ranks", Duration::from_secs(60), || {
            sandbox.try_state("write").is_some_and(|state| state["state"] == "ready")
        });
        Self { sandbox, run, go }
    }

    /// The names of the ranks, and of the one with this number.
    fn name(&self, rank: usize) -> String {
        let state = self.sandbox.state("write");
        state["workers"][rank]["name"].as_str().expect("a name").to_owned()
    }

    fn end(self, served: Served) {
        served.end();
        down(&self.sandbox, "write");
        self.run.wait();
        self.sandbox.assert_nothing_is_left();
    }
}

const LINES: &str = "[...document.querySelectorAll('#logs .line')]";

fn shows(text: &str) -> String {
    format!("{LINES}.some((line) => line.textContent.includes('{text}'))")
}

/// Types into the field for a text, as a person would.
fn search(browser: &Browser, text: &str) {
    browser.script(&format!(
        "const field = document.querySelector('#logs input[type=search]'); field.value = '{text}'; \
         field.dispatchEvent(new Event('input'))"
    ));
}

fn level(browser: &Browser, level: &str) {
    browser.script(&format!(
        "const field = document.querySelector('#logs select'); field.value = '{level}'; \
         field.dispatchEvent(new Event('change'))"
    ));
}

/// Opens the page and goes to the logs, which nobody asks for before.
fn opened(browser: &Browser, served: &Served) {
    browser.look_like(1440, "light");
    browser.open(&served.link);
    // What is above grows until then.
    browser.wait_for("document.querySelector('#worker-table tbody button')");
    browser.wait_for("document.querySelector('#charts canvas')");
    browser.script("document.querySelector('#logs').scrollIntoView({ block: 'center' })");
    browser.wait_for(&format!("{LINES}.length >= 60"));
}

#[test]
fn the_logs_of_all_processes_are_merged_followed_and_found_by_text_and_level() {
    let Some(browser) = Browser::start() else { return };
    let writers = Writers::start();
    let served = Served::start(&writers.sandbox);
    opened(&browser, &served);
    browser.wait_for(&shows("its end").replace("its end", "more bytes"));
    let top = "document.querySelector('#logs .lines').scrollTop";
    let is_at_end = "(() => { const box = document.querySelector('#logs .lines'); \
                     return box.scrollHeight - box.scrollTop - box.clientHeight < 9; })()";
    browser.wait_for(is_at_end);

    // Older lines come when they are scrolled to, each once, and the page stays small.
    eventually("the beginning", Duration::from_secs(60), || {
        browser.script("document.querySelector('#logs .lines').scrollTop = 0");
        browser.script(&format!("return {}", shows("step 0"))) == true
    });
    let count = browser.script(&format!("return {LINES}.length")).as_u64().expect("a number");
    assert!((1000..=2000).contains(&count), "{count} lines are on the page");
    let steps = format!(
        "return {LINES}.map((line) => line.textContent.match(/step (\\d+)$/)?.[1]).filter(Boolean)\
         .map(Number).every((step, at) => step === at)"
    );
    assert_eq!(browser.script(&steps), true, "in order, each once");

    // Those that were taken away come again below.
    // At the end, lines are followed again.
    eventually("the end", Duration::from_secs(60), || {
        browser.script(
            "const box = document.querySelector('#logs .lines'); box.scrollTop = box.scrollHeight",
        );
        browser.script("return Boolean(document.querySelector('#logs [aria-pressed=true]'))")
            == true
    });
    browser.wait_for(&shows("more bytes"));
    browser.wait_for(is_at_end);

    // What is written next is followed, unless somebody reads elsewhere.
    browser.script("document.querySelector('#logs .lines').scrollTop -= 300");
    browser.wait_for("document.querySelector('#logs [aria-pressed=false]')");
    let before = browser.script(&format!("return {top}"));
    std::fs::write(&writers.go, "").expect("written");
    std::thread::sleep(Duration::from_secs(3));
    assert_eq!(browser.script(&format!("return {top}")), before, "it stays where it is");
    browser.click("#logs [aria-pressed]");
    for rank in 0..3 {
        browser.wait_for(&shows(&format!("WARNING: after {rank}")));
    }
    browser.wait_for(is_at_end);
    browser.picture("logs-1440-light");
    browser.look_like(1440, "dark");
    browser.picture("logs-1440-dark");

    search(&browser, "STEP 49");
    browser.wait_for(&format!("{LINES}.length === 111"));
    browser.wait_for("/^111 lines found · all was searched/.test(document.querySelector('#logs [role=status]').textContent)");
    search(&browser, "hush");
    browser.wait_for(
        "/^0 lines found/.test(document.querySelector('#logs [role=status]').textContent)",
    );
    search(&browser, "");
    level(&browser, "error");
    browser.wait_for(&format!("{LINES}.length === 2 || {LINES}.length === 3"));
    browser.wait_for(&shows("a detail of it"));
    browser.picture("logs-errors-1440-dark");
    level(&browser, "warning");
    browser.wait_for(&shows("after 2"));

    // One process alone.
    level(&browser, "");
    let second = writers.name(1);
    browser.click("#logs .picker summary");
    browser.click(&format!("#logs .choices input[value='{second}']"));
    browser.wait_for(&format!(
        "{LINES}.length > 3 && {LINES}.every((line) => line.dataset.process === '{second}')"
    ));
    browser.wait_for(&shows("API_TOKEN=***"));
    assert!(!browser.script("return document.body.textContent").to_string().contains("hush"));
    browser.picture("logs-one-1440-dark");
    for scheme in ["light", "dark"] {
        browser.look_like(390, scheme);
        browser.script("document.querySelector('#logs').scrollIntoView()");
        browser.picture(&format!("logs-390-{scheme}"));
        browser.assert_it_fits("at 390");
    }
    assert_eq!(browser.errors(), [""; 0]);
    writers.end(served);
}

#[test]
fn a_link_leads_to_its_line_a_cut_line_is_opened_and_the_file_is_the_log() {
    let Some(browser) = Browser::start() else { return };
    let writers = Writers::start();
    let served = Served::start(&writers.sandbox);
    opened(&browser, &served);
    search(&browser, "step 1234");
    browser.wait_for(&format!("{LINES}.length === 1"));
    let link = browser.script("return document.querySelector('#logs .line .at').href");
    let link = link.as_str().expect("an address").to_owned();
    let first = writers.name(0);
    assert!(link.contains(&format!("#cluster=write&line={first}:0:")), "{link}");

    // In another window.
    browser.open("about:blank");
    browser.open(&link);
    let marked = "document.querySelector('#logs .line.marked')";
    browser.wait_for(&format!("/step 1234$/.test({marked}?.textContent)"));
    for near in ["step 1233", "step 1235"] {
        browser.wait_for(&shows(near));
    }
    let seen = format!(
        "const [line, box] = [{marked}, document.querySelector('#logs .lines')].map((one) => one.getBoundingClientRect()); \
         return line.top >= box.top && line.bottom <= box.bottom && box.top >= 0 && box.bottom <= innerHeight"
    );
    eventually("the line is in sight", Duration::from_secs(30), || browser.script(&seen) == true);
    browser.wait_for("document.querySelector('#logs [aria-pressed=false]')");
    browser.picture("logs-link-1440-light");
    // Another line, by its own link.
    browser.script(&format!(
        "{LINES}.find((line) => /step 1230$/.test(line.textContent)).querySelector('.at').click()"
    ));
    browser.wait_for(&format!("/step 1230$/.test({marked}?.textContent)"));

    browser.click("#logs [aria-pressed]");
    browser.wait_for("document.querySelector('#logs .more')");
    browser.script("document.querySelector('#logs .more').scrollIntoView({ block: 'center' })");
    browser.click("#logs .more");
    browser.wait_for("document.querySelector('#logs .whole')?.textContent.endsWith('x its end')");
    let length = browser.script("return document.querySelector('#logs .whole').textContent.length");
    assert_eq!(length, 100_008);
    browser.picture("logs-whole-1440-light");
    assert_eq!(browser.errors(), [""; 0]);

    let cookie = served.cookie();
    let get = |path: &str| -> Answer {
        served.ask(&format!("GET /api/clusters/write/{path}"), &[&cookie])
    };
    for rank in [0, 1] {
        let name = writers.name(rank);
        let answer = get(&format!("log/file?process={name}"));
        assert!(
            answer
                .head
                .contains(&format!("attachment; filename=\"cuda-cluster-write-{name}.log\"")),
            "{}",
            answer.head
        );
        assert!(answer.head.contains("content-type: text/plain"), "{}", answer.head);
        let log = writers.sandbox.base().join(format!("write/logs/{name}.log"));
        let log = std::fs::read_to_string(log).expect("a log");
        assert!(
            unchunked(&answer.body) == log.replace("hush", "***"),
            "the file is the log of {name}"
        );
    }
    let all = unchunked(&get("log/file").body);
    for line in ["hello of 0", "hello of 1", "hello of 2", "INFO step 4999", "API_TOKEN=***"] {
        assert!(all.contains(line), "{line}");
    }
    let times: Vec<&str> = all.lines().map(|line| &line[..24]).collect();
    assert!(times.is_sorted(), "by time");
    for (wrong, status) in [
        ("log?before=x", 400),
        ("log?level=loud", 400),
        ("log/line?line=..%2Fsecret:0:0", 404),
        ("log/line?line=", 400),
        ("log/file?process=..%2Fsecret", 400),
    ] {
        assert_eq!(get(wrong).status, status, "{wrong}");
    }
    for path in ["log", "log/line", "log/file"] {
        let answer = served.ask(&format!("GET /api/clusters/write/{path}"), &[]);
        assert_eq!(answer.status, 401, "{path} without the token");
    }
    writers.end(served);
}

/// A body that was sent in chunks.
fn unchunked(body: &str) -> String {
    let (mut rest, mut text) = (body.as_bytes(), Vec::new());
    while let Some(at) = rest.windows(2).position(|pair| pair == b"\r\n") {
        let length = std::str::from_utf8(&rest[..at]).ok();
        let length = length.and_then(|text| usize::from_str_radix(text, 16).ok());
        let length = length.expect("the length of a chunk");
        text.extend_from_slice(&rest[at + 2..at + 2 + length]);
        rest = &rest[at + 4 + length..];
        if length == 0 {
            break;
        }
    }
    String::from_utf8(text).expect("text")
}
