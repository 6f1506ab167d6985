//! Structured output: a sequence whose grammar needs long to compute its allowed tokens delays no other
//! sequence.

use std::{
    sync::atomic::{AtomicUsize, Ordering::SeqCst},
    thread,
};

use e2e_tests::{
    BASE, CompletionRequest, DeploymentPlan, StreamEnd, chaos::FailpointDirectory, fixtures, watched,
};

const MATCHED: u32 = 40;

#[test]
fn a_look_that_takes_long_makes_its_own_answer_wait_and_no_other() {
    watched(|| {
        let &[look, sits_out] = base_executor::GRAMMAR_FAILPOINTS else {
            panic!("the failpoints of structured output have changed")
        };
        let places = FailpointDirectory::new();
        let deployment = DeploymentPlan::bare().mortal(&places).start();
        let plain = CompletionRequest::new(BASE, fixtures::prompt(2, 8), MATCHED);
        // One character per token, and many alternatives at each.
        let matching = CompletionRequest {
            expression: Some("([0-9] ){200}"),
            ..CompletionRequest::new(BASE, fixtures::prompt(1, 8), MATCHED)
        };
        let golden = deployment.client.ask(&matching).answer;
        let alone = deployment.client.ask(&plain).answer;
        places.arm(sits_out, "wait 1");
        places.arm(look, "slow 500");
        let matched = AtomicUsize::new(0);
        thread::scope(|scope| {
            let mut slow = deployment.client.stream(&matching);
            assert_eq!(slow.step(), None, "it has begun");
            let matched = &matched;
            let reader = scope.spawn(move || {
                let ending = loop {
                    matched.fetch_add(1, SeqCst);
                    if let Some(ending) = slow.step() {
                        break ending;
                    }
                };
                (slow.answer, ending)
            });
            assert_eq!(deployment.client.ask(&plain).answer, alone);
            let before = matched.load(SeqCst);
            places.clear(look);
            let (answer, ending) = reader.join().unwrap();
            assert_eq!((answer, ending), (golden, StreamEnd::Done));
            assert!(before < MATCHED as usize / 2, "{before} of its tokens came first");
        });
        assert!(places.has_fired(sits_out));
    });
}
