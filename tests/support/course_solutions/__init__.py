"""Right and wrong solutions of the exercises, one module per notebook; `test_course_exercises` tries them all.

    RIGHT = {"02.allocate": [BlockPool, AnotherWay]}                        two at least, written differently
    WRONG = {"02.allocate": [(TakesOneTooMany, "expected 3, got 4"), …]}    three at least, with words of their verdict
"""
