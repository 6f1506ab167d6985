//! `chat` against a fake gateway: one question, and a conversation on a terminal.

use std::{io::Write as _, net::TcpListener, process::Stdio};

use crate::common::{CommandFixture, eventually_some, gateway::FakeGateway, run, terminal::AtTerminal};
use serde_json::{Value, json};

#[test]
fn a_question_on_the_command_line_is_answered_on_stdout() {
    let (stage, gateway) = (CommandFixture::new(), FakeGateway::start());
    let ended = run(&mut gateway.command(&stage, &["chat", ":pirate", "Who are you?", "--max-tokens", "9"]));
    assert_eq!((ended.status.code(), ended.out.as_str()), (Some(0), "I am pirate\n"), "{}", ended.err);
    let body = &gateway.bodies()[0];
    assert_eq!(body["messages"], json!([{"role": "user", "content": "Who are you?"}]));
    assert_eq!((&body["max_tokens"], &body["stream"]), (&json!(9), &json!(true)));
    assert_eq!(body["stream_options"], json!({"include_usage": true}), "no terminal, no guesses");
}

#[test]
fn a_question_alone_is_to_the_base_and_a_word_alone_is_a_name() {
    let (stage, gateway) = (CommandFixture::new(), FakeGateway::start());
    let ended = run(&mut gateway.command(&stage, &["chat", "Tell me: who are you?"]));
    assert_eq!((ended.status.code(), ended.out.as_str()), (Some(0), "I am smol\n"), "{}", ended.err);
    assert_eq!(
        gateway.bodies()[0]["messages"],
        json!([{"role": "user", "content": "Tell me: who are you?"}])
    );
    for target in ["nobody", ":no body"] {
        let ended = run(&mut gateway.command(&stage, &["chat", target]));
        assert_eq!(ended.status.code(), Some(3), "{target}: {}", ended.err);
    }
}

#[test]
fn a_question_may_come_from_stdin_and_the_answer_leave_as_json() {
    let (stage, gateway) = (CommandFixture::new(), FakeGateway::start());
    let mut command = gateway.command(&stage, &["chat", "--json"]);
    let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"Who are you?").unwrap();
    let output = child.wait_with_output().unwrap();
    let value: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(value["content"], "I am smol");
    assert_eq!(value["usage"]["completion_tokens"], 3);
}

#[test]
fn chat_exits_with_the_documented_codes() {
    let (stage, gateway) = (CommandFixture::new(), FakeGateway::start());
    let cases = [
        (":nobody", 3, "pirate"),
        (":full", 5, "the queue is full"),
        (":broken", 5, "connection to the gateway broke"),
    ];
    for (target, code, text) in cases {
        let ended = run(&mut gateway.command(&stage, &["chat", target, "hello"]));
        assert_eq!(ended.status.code(), Some(code), "{target}: {}", ended.err);
        assert!(ended.err.contains(text), "{target}: {}", ended.err);
    }
    let ended = run(&mut gateway.command(&stage, &["chat"]));
    assert_eq!(ended.status.code(), Some(2), "an empty stdin is no question: {}", ended.err);
}

#[test]
fn without_a_gateway_chat_is_unavailable_and_says_what_to_start() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let ended = run(&mut CommandFixture::new().command(&[
        "chat",
        "--url",
        &format!("http://127.0.0.1:{port}"),
        "",
        "hello",
    ]));
    assert_eq!(ended.status.code(), Some(5), "{}", ended.err);
    assert!(ended.err.contains("try: holobiont up"), "{}", ended.err);
}

#[test]
fn a_seed_and_a_system_message_reach_the_gateway() {
    let (stage, gateway) = (CommandFixture::new(), FakeGateway::start());
    let line = ["chat", "--seed", "-7", "--system", "Be brief.", "--temperature", "0.5", "", "Who are you?"];
    assert!(run(&mut gateway.command(&stage, &line)).status.success());
    let body = &gateway.bodies()[0];
    assert_eq!((&body["seed"], &body["temperature"]), (&json!(-7), &json!(0.5)));
    assert_eq!(body["messages"][0], json!({"role": "system", "content": "Be brief."}));
}

fn wait_for_bodies(gateway: &FakeGateway, count: usize) -> Vec<Value> {
    eventually_some(&format!("{count} requests"), || {
        Some(gateway.bodies()).filter(|bodies| bodies.len() >= count)
    })
}

#[test]
fn ctrl_c_ends_a_silent_answer_and_not_the_conversation() {
    let (stage, gateway) = (CommandFixture::new(), FakeGateway::start());
    let mut terminal = AtTerminal::start(&gateway.command(&stage, &["chat"]), &stage, "smol> ");
    terminal.keys("Take your time.\r");
    terminal.wait_for("Well, ");
    terminal.keys("\u{3}");
    assert_eq!(wait_for_bodies(&gateway, 2)[1], json!("hung up"), "the gateway learns that nobody listens");
    // Ctrl-C before the next prompt is still a signal, but there is nothing left to stop.
    terminal.wait_for_all(&["stopped", "smol> "]);
    terminal.keys("\u{3}");
    terminal.wait_for("/bye ends");
    terminal.keys("/adapter :pirate\r/set seed 7\r/system Be brief.\rgo on\r");
    terminal.wait_for("I am pirate");
    let body = &wait_for_bodies(&gateway, 3)[2];
    let said =
        [("system", "Be brief."), ("user", "Take your time."), ("assistant", "Well, "), ("user", "go on")];
    assert_eq!(
        body["messages"],
        json!(said.map(|(role, content)| json!({"role": role, "content": content})))
    );
    assert_eq!(body["seed"], json!(7));
    assert_eq!(terminal.end("\x04"), Some(0));
}

#[test]
fn what_is_drafted_is_shown_dimmed_and_erased_before_the_answer_goes_on() {
    let (stage, gateway) = (CommandFixture::new(), FakeGateway::start());
    let mut terminal = AtTerminal::start(&gateway.command(&stage, &["chat"]), &stage, "smol> ");
    terminal.keys("Guess!\r");
    terminal.wait_for_all(&[
        "I am \u{1b}7",
        "\u{1b}[2msmart\u{1b}[0m",
        "\u{1b}8",
        "\u{1b}[K",
        "[2msm\u{1b}[0m",
        "\u{1b}[Ksmol",
    ]);
    terminal.keys("Go on.\r");
    let bodies = wait_for_bodies(&gateway, 2);
    assert_eq!(bodies[0]["stream_options"]["provisional"], json!(true));
    assert_eq!(bodies[1]["messages"][1]["content"], "I am smol", "only what was said was said");
    assert_eq!(terminal.end("\x04"), Some(0));
    for arguments in [&["chat", "--no-provisional"][..], &["chat", "--color", "never"]] {
        let mut terminal = AtTerminal::start(&gateway.command(&stage, arguments), &stage, "smol> ");
        terminal.keys("Go on.\r");
        terminal.wait_for("I am smol");
        let asked = gateway.bodies().pop().unwrap();
        assert_eq!(asked["stream_options"], json!({"include_usage": true}), "{arguments:?}");
        assert_eq!(terminal.end("\x04"), Some(0));
    }
}

#[test]
fn lines_are_edited_completed_and_remembered_from_one_conversation_to_the_next() {
    let (stage, gateway) = (CommandFixture::new(), FakeGateway::start());
    let mut terminal = AtTerminal::start(&gateway.command(&stage, &["chat"]), &stage, "smol> ");
    // Left, backspace, a letter, Ctrl-E; then a completed name, and a text of two lines.
    terminal.keys("hullo\u{1b}[D\u{1b}[D\u{1b}[D\u{7f}e\u{5} you\r");
    terminal.wait_for("I am smol");
    terminal.keys("/ad\tpi\t\r\"\"\"one\rtwo\"\"\"\r");
    terminal.wait_for("I am pirate");
    assert_eq!(terminal.end("\x04"), Some(0));
    let mut terminal = AtTerminal::start(&gateway.command(&stage, &["chat"]), &stage, "smol> ");
    // Within a text of two lines, Up first goes to its first line and then to the history.
    terminal.keys("\u{1b}[A\u{1b}[A\u{1b}[A\u{1b}[A\r");
    let bodies = wait_for_bodies(&gateway, 3);
    let asked = |body: &Value| body["messages"].as_array().unwrap().last().unwrap()["content"].clone();
    assert_eq!(bodies.iter().map(asked).collect::<Vec<_>>(), ["hello you", "one\ntwo", "hello you"]);
    assert_eq!(terminal.end("\x04"), Some(0));
}
