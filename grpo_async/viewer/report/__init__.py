"""The report: what runs did, in one HTML file that needs no network.

    run directories -> run_data.RunData -> findings (is it learning?), plots, rollouts, configs -> sections -> page -> report.html

`grpo_async.viewer.report.write.write_report` does all of it. What a run lacks (it was killed, it never
evaluated) is said in the report; it never breaks it.
"""
