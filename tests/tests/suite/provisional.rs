//! Draft tokens are streamed during their verification, and rejected ones are retracted, even if a process is
//! killed meanwhile.

use e2e_tests::{
    BASE, CompletionRequest, Deployment, DeploymentPlan, MODELS, StreamEnd, chaos::FailpointDirectory,
    fixtures, stream::ShownDrafts, watched,
};

/// Repetitive prompt, whose continuation is easy to draft.
fn prompt(salt: u32) -> Vec<u32> {
    fixtures::prompt(salt, 12).repeat(6)
}

fn curious(model: &str, salt: u32, max_tokens: u32) -> CompletionRequest {
    CompletionRequest { provisional: true, ..CompletionRequest::new(model, prompt(salt), max_tokens) }
}

fn drafting() -> DeploymentPlan {
    DeploymentPlan::with_examples().cores(2).set("DRAFT", "ngram")
}

fn plain() -> Deployment {
    DeploymentPlan::with_examples().cores(2).set("DRAFT", "off").start()
}

/// Sends the request to both deployments, compares the answers, and returns the streamed drafts.
fn compare_drafts(drafting: &Deployment, plain: &Deployment, ask: &CompletionRequest) -> ShownDrafts {
    let expected = plain.client.ask(ask).answer;
    let [with, without] = [drafting, plain].map(|deployment| {
        let mut stream = deployment.client.stream(ask);
        assert_eq!((stream.read_to_end(), &stream.answer), (StreamEnd::Done, &expected), "{ask:?}");
        stream.told
    });
    assert_eq!(without, ShownDrafts::default(), "nobody drafts there");
    with
}

#[test]
fn what_is_told_of_drafts_changes_no_answer_and_is_text_or_taken_back_at_the_end() {
    watched(|| {
        let (drafting, plain) = (drafting().start(), plain());
        let (mut came_true, mut retracted) = (0, 0);
        // A drafter that gets no time beside other tests drafts little, so there may be further rounds.
        for round in 0..5 {
            for (model, salt) in MODELS.into_iter().zip(920 + 100 * round..) {
                for seed in [None, Some(1), Some(2)] {
                    let ask = CompletionRequest { seed, ..curious(model, salt, 48) };
                    let told = compare_drafts(&drafting, &plain, &ask);
                    came_true += told.came_true;
                    retracted += told.retracted;
                }
            }
            if came_true > 0 && retracted > 0 {
                break;
            }
        }
        assert!(came_true > 0 && retracted > 0, "{came_true} came true, {retracted} were taken back");
        let silent = CompletionRequest { provisional: false, ..curious(BASE, 920, 48) };
        assert_eq!(compare_drafts(&drafting, &plain, &silent), ShownDrafts::default(), "nobody asked");
    });
}

#[test]
fn an_executor_that_dies_while_a_guess_stands_leaves_nothing_of_it() {
    watched(|| {
        let places = FailpointDirectory::new();
        // Slow weight streaming makes drafts stay unverified for long.
        let deployment = drafting().streaming(20).mortal(&places).start();
        let ask = curious(BASE, 960, 400);
        let mut stream = deployment.client.stream(&ask);
        while stream.told.standing.is_empty() {
            places.arm("executor.decode", "wait 100");
            assert_eq!(stream.step(), None, "the answer is long, and a guess comes");
        }
        places.clear("executor.decode");
        deployment.kill_executor();
        while !stream.told.standing.is_empty() {
            assert_eq!(stream.step(), None, "it is taken back, and then another goes on");
        }
        let (answer, ending) = stream.finish();
        assert_eq!((ending, answer), (StreamEnd::Done, plain().client.ask(&ask).answer));
    });
}
